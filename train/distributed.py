"""Several processes, one a GPU, that train one model: started by torchrun, joined here.

Every collective is called by all processes in the same order; alone, each is a no-op.
"""

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bertship.errors import InputError

TIMEOUT = timedelta(minutes=30)  # a checkpoint of a large model, written while the others wait


@dataclass(frozen=True)
class Processes:
    """This process among all: its number from 0, how many there are, and the device that is its own."""

    rank: int
    count: int
    device: torch.device

    @property
    def main(self) -> bool:
        """Whether this is the process that reports and writes."""
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Each value's sum over all processes, in double precision."""
        if self.count == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def agree(self, value: str) -> str:
        """The main process's value, for all."""
        if self.count == 1:
            return value
        held = [value]
        dist.broadcast_object_list(held, src=0, device=self.device)
        return held[0]

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, in the order of their numbers, for all."""
        if self.count == 1:
            return [value]
        held: list[Any] = [None] * self.count
        dist.all_gather_object(held, value)
        return held

    @contextlib.contextmanager
    def main_first(self) -> Iterator[None]:
        """The main process runs the block before the others do, which find on disk what it has fetched or computed."""
        if not self.main:
            self.wait()
        try:
            yield
        finally:
            if self.main:
                self.wait()

    def judge(self, action: Callable[[], None]) -> None:
        """The main process does `action`; its InputError is raised by all, who would wait for it in vain otherwise."""
        refusal = ""
        if self.main:
            try:
                action()
            except InputError as error:
                refusal = str(error)
        if refusal := self.agree(refusal):
            raise InputError(refusal)

    def wait(self) -> None:
        """Until all have come this far."""
        self.sum(0.0)

    def share(self, model: nn.Module) -> nn.Module:
        """`model` with gradients averaged over all processes (Li et al. 2020); `model` itself where there is one."""
        if self.count == 1:
            return model
        return DistributedDataParallel(model, gradient_as_bucket_view=True)


def alone() -> Processes:
    """This process as the only one, on the first GPU where there is one."""
    return Processes(0, 1, torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))


@contextlib.contextmanager
def join() -> Iterator[Processes]:
    """The process group that torchrun's environment describes, NCCL on CUDA and gloo elsewhere; else this one alone.

    Raises InputError where a process has no GPU of its own on a machine with GPUs.
    """
    local = int(os.environ.get("LOCAL_RANK", "0"))
    on_cuda = torch.cuda.is_available()
    if on_cuda and local >= torch.cuda.device_count():
        raise InputError(
            f"process {local} of this machine has no GPU: there are {torch.cuda.device_count()}; start fewer (GPUS=)"
        )
    device = torch.device("cuda", local) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
        yield Processes(0, 1, device)
        return
    dist.init_process_group("nccl" if on_cuda else "gloo", timeout=TIMEOUT, device_id=device if on_cuda else None)
    try:
        processes = Processes(dist.get_rank(), dist.get_world_size(), device)
        yield processes
        processes.wait()  # one that leaves first closes connections on which another may still be waiting
    finally:
        gc.collect()  # what still holds the group's threads, such as a model that was shared, goes before the group
        dist.destroy_process_group()


def device_name(device: torch.device) -> str:
    """`cpu`, or the GPU's own name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
