"""Checkpoints of a training that can go on: written beside and renamed, checked when read, the old ones removed.

A checkpoint is a directory `step-00001200`, named by the updates done, in Hugging Face's layout (so it is a warm start
as it is), with two files more:

    optimizer.safetensors   the moments, by parameter name: `encoder.pooler.weight/exp_avg`
    training.json           everything else that a training needs, as the caller gave it

`manifest.json` has the hash of each file: what is not whole is passed over for the one before.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from bertship import artifacts
from bertship.errors import InputError
from bertship.tokenization import Tokenizer
from train.checkpoint import save_model
from train.heads import HeadedModel

OPTIMIZER = "optimizer.safetensors"
TRAINING = "training.json"
RECIPE = "recipe.json"
LOCK = "lock"
_PREFIX = "step-"


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint that was found whole: `path`, the updates done, and what `training.json` says."""

    path: Path
    step: int
    state: dict[str, Any]


class Snapshots:
    """The checkpoints in one directory; the newest `keep` and the best one stay.

    The best has the lowest `state["held_out"]`, a number; a checkpoint without one is never the best.
    """

    def __init__(self, directory: Path, keep: int = 2) -> None:
        self.directory, self.keep = directory, keep

    def save(
        self,
        step: int,
        model: HeadedModel,
        tokenizer: Tokenizer,
        moments: dict[str, Tensor],
        state: dict[str, Any],
        also: Mapping[str, dict[str, Tensor]] | None = None,
        **extra_config: Any,
    ) -> Path:
        """Write the checkpoint of `step` updates and remove those that are no longer kept.

        `moments`: `optimizer_tensors`; `state`: anything that is JSON; `also`: further files, of tensors by name.
        Raises InputError where the disk is full; the earlier checkpoints are as they were then.
        """
        target = self.directory / f"{_PREFIX}{step:08d}"
        with artifacts.publish(target) as staging:
            save_model(model, tokenizer, staging, **extra_config)
            for name, tensors in {OPTIMIZER: moments, **(also or {})}.items():
                save_file(tensors, staging / name)
            (staging / TRAINING).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
            artifacts.write_manifest(staging, "checkpoint", step=step)
            for path in [*staging.iterdir(), staging]:
                _to_disk(path)  # a machine that loses power must not keep the new name and lose what it names
        _to_disk(self.directory)
        self._remove_old()
        return target

    def steps(self) -> list[int]:
        """Updates of the checkpoints that are there, ascending."""
        names = (path.name.removeprefix(_PREFIX) for path in self.directory.glob(f"{_PREFIX}*"))
        return sorted(int(name) for name in names if name.isdigit())

    def path(self, step: int) -> Path:
        return self.directory / f"{_PREFIX}{step:08d}"

    def newest(self, report: Callable[[str], None]) -> Snapshot | None:
        """The newest checkpoint that is whole; what is not is said and passed over. None where there is none."""
        for step in reversed(self.steps()):
            try:
                return self.read(step)
            except InputError as error:
                report(f"WARNING: checkpoint {self.path(step)} is damaged and is passed over ({error})")
        return None

    def read(self, step: int) -> Snapshot:
        """The checkpoint of `step` updates. Raises InputError where it is not whole."""
        path = self.path(step)
        manifest = artifacts.read_manifest(path, "checkpoint")
        artifacts.check_files(path, manifest, manifest["files"])
        return Snapshot(path, step, json.loads((path / TRAINING).read_text(encoding="utf-8")))

    def best(self) -> int | None:
        """The step of the best checkpoint."""
        scored = []
        for step in self.steps():
            try:
                score = json.loads((self.path(step) / TRAINING).read_text(encoding="utf-8")).get("held_out")
            except (ValueError, OSError):
                continue
            if score is not None:
                scored.append((score, step))
        return min(scored)[1] if scored else None

    def _remove_old(self) -> None:
        steps = self.steps()
        for step in set(steps[: -self.keep]) - {self.best()}:
            shutil.rmtree(self.path(step), ignore_errors=True)


def optimizer_tensors(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's state of every parameter as `name/state`, on the CPU.

    A sharded optimizer must have been consolidated on this process (`consolidate_state_dict`).
    """
    names = _names(optimizer, model)
    state = optimizer.state_dict()["state"]
    return {
        f"{names[index]}/{key}": torch.as_tensor(value).detach().cpu().contiguous()
        for index, values in state.items()
        for key, value in values.items()
    }


def is_sharded(optimizer: Optimizer) -> bool:
    """Whether each process has the moments of its share of the parameters alone."""
    return hasattr(optimizer, "consolidate_state_dict")


def load_optimizer(optimizer: Optimizer, model: nn.Module, path: Path) -> None:
    """Put the moments of the checkpoint `path` into `optimizer`, whose groups (learning rates, decay) stay.

    Raises InputError where the checkpoint's parameters are not the model's.
    """
    stored = load_file(path / OPTIMIZER)
    names = _names(optimizer, model)
    numbers = {name: number for number, name in enumerate(names)}
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in stored.items():
        parameter, _, key = name.rpartition("/")
        if parameter not in numbers:
            raise InputError(f"{path / OPTIMIZER} has moments of {parameter}, which is not trained here")
        state.setdefault(numbers[parameter], {})[key] = tensor
    if stored and len(state) != len(names):
        missing = next(name for number, name in enumerate(names) if number not in state)
        raise InputError(f"{path / OPTIMIZER} has no moments of {missing}")
    if is_sharded(optimizer):
        groups = [
            {key: value for key, value in group.items() if key != "params"} | {"params": numbers_of}
            for group, numbers_of in zip(optimizer.param_groups, _numbered(optimizer), strict=True)
        ]
        optimizer.load_state_dict({"state": state, "param_groups": groups})
        return
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


@contextlib.contextmanager
def held(home: Path) -> Iterator[None]:
    """Within the block `home`, the folder of a training in progress, is this process's alone; without a trace where
    nothing came of it.

    Raises InputError where another process trains there. A lock of POSIX's: it ends with the process, whatever ends it,
    and no forked one has it. On a file system without locks nothing is held.
    """
    made = not home.exists()
    artifacts.make_directory(home)
    path = home / LOCK
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                file.seek(0)
                raise InputError(
                    f"process {file.read().strip() or 'of another machine'} is training in {home}; wait for it, stop "
                    "it, or take another name (--name)"
                ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            if made:
                with contextlib.suppress(OSError):  # something is in it that is worth going on with, or it is published
                    home.rmdir()


def claim(home: Path, recipe: dict[str, Any]) -> None:
    """Make the folder of a training in progress and say there whose it is."""
    artifacts.write_text(home / RECIPE, json.dumps(recipe, indent=2) + "\n")


def check_claim(home: Path, recipe: dict[str, Any], restart: bool) -> None:
    """Refuse the folder of an interrupted training of another `recipe`: it may be days of work. `restart` removes it.

    Raises InputError that names what differs.
    """
    if restart:
        artifacts.clear_directory(home, but=LOCK)
        with contextlib.suppress(OSError):
            home.rmdir()
    path = home / RECIPE
    if not path.is_file():
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    wanted = json.loads(json.dumps(recipe))
    if found != wanted:
        raise InputError(
            f"{home} holds an interrupted training with another {_difference(found, wanted)}; go on with those "
            "settings, take another name (--name), or begin anew (--force), which removes it"
        )


def _difference(found: Any, wanted: Any) -> str:
    """The first setting that differs, with both values where they are short."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for name in {**found, **wanted}:
            if found.get(name) != wanted.get(name):
                below = _difference(found.get(name), wanted.get(name))
                return name + (f".{below}" if below and not below.startswith(" ") else below)
    both = f" ({found} there, {wanted} asked for)"
    return both if len(both) < 100 else ""


def link_tree(source: Path, target: Path) -> None:
    """Give the files of `source`, which may be missing, a second name under `target` on the same file system."""
    if source.is_dir():
        shutil.copytree(source, target, copy_function=os.link)
    elif source.is_file():
        os.link(source, target)


def _names(optimizer: Optimizer, model: nn.Module) -> list[str]:
    """Names of the optimized parameters in the order of the optimizer's groups, which numbers them."""
    of = {id(parameter): name for name, parameter in model.named_parameters()}
    return [of[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def _numbered(optimizer: Optimizer) -> list[list[int]]:
    counted = iter(range(sum(len(group["params"]) for group in optimizer.param_groups)))
    return [[next(counted) for _ in group["params"]] for group in optimizer.param_groups]


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
