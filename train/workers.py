"""Processes that turn chunks into ids."""

import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

from bertship.errors import CheckFailed
from bertship.tokenization import Tokenizer
from train.encode import Encoded, Encoder, words_of
from train.inputs import Input
from train.readers import Chunk, records_named

Job = TypeVar("Job")
_WORKER_LOST = (
    "a tokenizing process was killed, perhaps for want of memory; start again, with fewer --workers: it goes on where "
    "it was"
)


class Workers:
    """Processes that take chunks and give results in the order of the chunks; none where there is little to do."""

    def __init__(self, count: int, tokenizer_dir: Path, language: str, text_field: str, seed: int) -> None:
        """`count` 0: everything is done in this process. The tokenizer is not read before something is encoded."""
        self._count = count
        self._settings = (tokenizer_dir, language, text_field, seed)
        self._encoder: Encoder | None = None
        # started anew, never forked: a fork of a process that has tokenized can hang
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(count, context, _start, self._settings) if count else None

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def encode(self, jobs: Iterable[tuple[Job, Input, Chunk | None]]) -> Iterator[tuple[Job, Encoded | None]]:
        """Each job with its chunk's ids, None where it has no chunk. Raises InputError, CheckFailed."""
        return self._in_order(jobs, _encode, self._encode_here)

    def count(self, jobs: Iterable[tuple[Job, Input, Chunk]]) -> Iterator[tuple[Job, Counter[str]]]:
        """Each job with the words of its chunk. Raises InputError, CheckFailed."""
        return self._in_order(jobs, _count, lambda chunk: words_of(chunk, self._settings[2]))

    def _in_order(
        self,
        jobs: Iterable[tuple[Job, Input, Chunk | None]],
        there: Callable[[Chunk], Any],
        here: Callable[[Chunk], Any],
    ) -> Iterator[tuple[Job, Any]]:
        waiting: deque[tuple[Job, Input, Future[Any] | None]] = deque()
        for job, item, chunk in jobs:
            if self._pool is None:
                with records_named(item):
                    result = here(chunk) if chunk else None
                yield job, result
                continue
            try:
                waiting.append((job, item, self._pool.submit(there, chunk) if chunk else None))
            except BrokenProcessPool:
                raise CheckFailed(_WORKER_LOST) from None
            if len(waiting) > 2 * self._count:
                yield _result(*waiting.popleft())
        while waiting:
            yield _result(*waiting.popleft())

    def _encode_here(self, chunk: Chunk) -> Encoded:
        if self._encoder is None:
            self._encoder = _encoder_of(*self._settings)
        return self._encoder.encode(chunk)


def _result(job: Job, item: Input, future: "Future[Any] | None") -> tuple[Job, Any]:
    if future is None:
        return job, None
    try:
        with records_named(item):
            return job, future.result()
    except BrokenProcessPool:
        raise CheckFailed(_WORKER_LOST) from None


def _encoder_of(tokenizer_dir: Path, language: str, text_field: str, seed: int) -> Encoder:
    return Encoder(Tokenizer.from_dir(tokenizer_dir), language, text_field, seed)


# what a process holds that works for another
_settings: tuple[Path, str, str, int] | None = None
_encoder: Encoder | None = None


def _start(tokenizer_dir: Path, language: str, text_field: str, seed: int) -> None:
    """One core, gone with its parent, deaf to the Ctrl-C that is meant for that."""
    global _settings  # noqa: PLW0603 - a process works for one build
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if parent := multiprocessing.parent_process():
        threading.Thread(target=_leave_with, args=[parent], daemon=True).start()
    _settings = (tokenizer_dir, language, text_field, seed)


def _leave_with(parent: Any) -> None:
    parent.join()  # a parent that was killed could tell nobody
    os._exit(1)


def _encode(chunk: Chunk) -> Encoded:
    global _encoder  # noqa: PLW0603
    assert _settings is not None
    if _encoder is None:
        _encoder = _encoder_of(*_settings)
    return _encoder.encode(chunk)


def _count(chunk: Chunk) -> Counter[str]:
    assert _settings is not None
    return words_of(chunk, _settings[2])
