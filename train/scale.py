"""A corpus by many machines: the builder's steps as a `datatrove` pipeline, for its local, Slurm and Ray executors.

    from datatrove.executor import LocalPipelineExecutor
    from train.scale import MergeCorpus, ShardCorpus, prepare

    if __name__ == "__main__":
        work = "/shared/work"                          # a folder that all machines see
        prepare(["/shared/books"], work, CorpusConfig(vocab_size=30_522))
        shards = LocalPipelineExecutor([ShardCorpus(work)], tasks=64, workers=8, logging_dir="/shared/logs/shards")
        merge = [MergeCorpus(work, "runs/corpus/books")]
        LocalPipelineExecutor(merge, logging_dir="/shared/logs/merge", depends=shards).run()

A task builds every `tasks`-th unit of the input, shards appear whole, and the merged corpus has the same bytes as one
that `build_corpus` makes on one machine, whatever the number of tasks. docs/corpus.md has Slurm and Ray.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bertship.config import CorpusConfig
from bertship.progress import to_stderr
from bertship.tokenization import Tokenizer
from train import corpus
from train.inputs import Source, need_extra

need_extra("datatrove", "scale", "a datatrove pipeline")

from datatrove.pipeline.base import PipelineStep  # noqa: E402 - once it is known to be there


def prepare(
    sources: Sequence[Source],
    work: str | Path,
    config: CorpusConfig,
    tokenizer: Tokenizer | None = None,
    report: Callable[[str], None] = to_stderr,
) -> int:
    """Make `work` the working directory of a corpus, its vocabulary included, before the pipeline is started.

    Returns the number of units, above which more tasks have nothing to do. Raises InputError.
    """
    return len(corpus.prepare(sources, Path(work), config, tokenizer, report).units)


class ShardCorpus(PipelineStep):
    """Builds the shards of each `world_size`-th unit of a prepared working directory, from `rank` on.

    A task that is started again does what is missing of its shards alone.
    """

    name = "corpus shards"
    type = "bertship"

    def __init__(self, work: str | Path) -> None:
        super().__init__()
        self.work = str(work)

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Any:
        """Yields nothing; passes on what came before it."""
        if data:
            yield from data
        plan = corpus.Plan.open(Path(self.work))
        numbers = range(rank, len(plan.units), world_size)
        with self.track_time("shards"):
            corpus.build_shards(plan, numbers, workers=0)
        self.stat_update("units", value=len(numbers), unit="task")


class MergeCorpus(PipelineStep):
    """Puts the shards together as the corpus directory `out`; one task, once all of ShardCorpus are done."""

    name = "corpus merge"
    type = "bertship"

    def __init__(self, work: str | Path, out: str | Path) -> None:
        super().__init__()
        self.work, self.out = str(work), str(Path(out).absolute())

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Any:
        """Yields nothing; passes on what came before it."""
        if data:
            yield from data
        if rank == 0:
            with self.track_time("merge"):
                manifest = corpus.merge(corpus.Plan.open(Path(self.work)), Path(self.out))
            self.stat_update("documents", value=manifest["metrics"]["documents"], unit="task")
