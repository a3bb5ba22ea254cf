"""The batches of a training: a pure function of the update's number, so a run resumes by knowing how far it is."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bertship.config import PretrainConfig
from bertship.errors import InputError
from train.attention import Sequences
from train.dataset import PretrainingDataset, Sample
from train.packing import WHERE, lay_out

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Phase:
    """A part of the training with one length of sequences and one schedule."""

    steps: int  # updates
    sequence_length: int  # tokens
    batch_size: int  # sequences an update, over all processes
    learning_rate: float  # at its peak
    warmup_steps: int  # updates


def phases_of(config: PretrainConfig) -> list[Phase]:
    """The first phase and, where `long_steps` asks for it, the second on longer sequences (paper, section A.2)."""
    first = Phase(config.steps, config.sequence_length, config.batch_size, config.learning_rate, config.warmup_steps)
    if not config.long_steps:
        return [first]
    second = Phase(
        config.long_steps,
        config.long_sequence_length,
        config.long_batch_size or config.batch_size,
        config.long_learning_rate or config.learning_rate,
        config.warmup_steps if config.long_warmup_steps is None else config.long_warmup_steps,
    )
    return [first, second]


def layout_of(config: PretrainConfig) -> str:
    """Of `train.packing.LAYOUTS`, the one that `rows` names; auto is unpadded, which is the fastest on every device.

    Raises InputError where a sequence does not fit into a packed row.
    """
    layout = "unpadded" if config.rows == "auto" else config.rows
    longest = max(phase.sequence_length for phase in phases_of(config))
    if layout == "packed" and config.packed_length < longest:
        raise InputError(f"packed_length {config.packed_length} is below sequence_length {longest}; raise it")
    return layout


class Updates(Dataset[list[Batch]]):
    """Item k: the microbatches of one process in update k.

    Over all `processes`, update k has the samples k * batch_size to (k + 1) * batch_size - 1 of the epochs' orders,
    however many processes and microbatches they are dealt to. Rows of like length share a microbatch, so little of
    it is padding. Raises InputError where the sequences cannot be dealt evenly.
    """

    def __init__(
        self,
        dataset: PretrainingDataset,
        steps: int,
        batch_size: int,
        config: PretrainConfig,
        layout: str,
        process: int = 0,
        processes: int = 1,
    ) -> None:
        if batch_size % processes:
            raise InputError(
                f"batch_size {batch_size} cannot be dealt evenly to {processes} processes; take a multiple of it"
            )
        self.dataset, self.steps, self.batch_size = dataset, steps, batch_size
        self.layout, self.packed_length = layout, config.packed_length
        self.process, self.processes = process, processes
        self.microbatch_size = config.microbatch_size or batch_size // processes

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, update: int) -> list[Batch]:
        samples = self.samples(update)
        if self.layout != "packed":  # packing mixes lengths to fill its rows
            samples.sort(key=lambda sample: len(sample.row))
        return [
            {name: torch.from_numpy(array) for name, array in self._lay_out(samples[start : start + size]).items()}
            for size in [self.microbatch_size]
            for start in range(0, len(samples), size)
        ]

    def samples(self, update: int) -> list[Sample]:
        """This process's samples of an update."""
        samples = []
        for visit in range(update * self.batch_size + self.process, (update + 1) * self.batch_size, self.processes):
            epoch, place = divmod(visit, len(self.dataset))
            samples.append(self.dataset.sample(int(self.dataset.order(epoch)[place]), epoch))
        return samples

    def _lay_out(self, samples: list[Sample]) -> dict[str, np.ndarray]:
        return lay_out(samples, self.layout, self.dataset.tokenizer.pad_id, self.packed_length)


@dataclass(frozen=True)
class Counts:
    """Of the microbatches of one process: tokens, positions computed (padding included), predictions, pairs, IsNext."""

    lengths: tuple[int, ...]
    computed: int
    predicted: int
    pairs: int
    is_next: int

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @classmethod
    def of(cls, microbatches: list[Batch]) -> "Counts":
        """Of microbatches that are still on the CPU, where counting waits for nothing."""
        lengths: list[int] = []
        for batch in microbatches:
            bounds = batch.get(f"{WHERE}bounds")
            lengths += (batch["attention_mask"].sum(1) if bounds is None else bounds.diff()).tolist()
        return cls(
            tuple(lengths),
            sum(batch["input_ids"].numel() for batch in microbatches),
            sum(len(batch["mlm_labels"]) for batch in microbatches),
            sum(len(batch["nsp_labels"]) for batch in microbatches),
            sum(int((batch["nsp_labels"] == 0).sum()) for batch in microbatches),
        )


def iterate(updates: Updates, start: int, workers: int, device: torch.device) -> Iterator[tuple[Counts, list[Batch]]]:
    """Updates `start` and on, made ahead by `workers` processes where there are any, on `device`."""
    on_cuda = device.type == "cuda"
    if workers:
        loader = DataLoader(
            updates,
            batch_size=None,
            sampler=range(start, len(updates)),
            num_workers=workers,
            multiprocessing_context="fork",  # the corpus is memory-mapped: shared, not copied
            pin_memory=on_cuda,
            prefetch_factor=4,
        )
        made: Iterator[list[Batch]] = iter(loader)
    else:
        made = (updates[number] for number in range(start, len(updates)))
    for microbatches in made:
        counts = Counts.of(microbatches)
        on_device = ({name: tensor.to(device, non_blocking=True) for name, tensor in b.items()} for b in microbatches)
        yield counts, list(on_device)


def where_of(batch: Batch) -> Sequences | None:
    """Where sequences that share rows lie; None where each has its own."""
    if f"{WHERE}places" not in batch:
        return None
    return Sequences(**{name: batch[f"{WHERE}{name}"] for name in Sequences._fields})
