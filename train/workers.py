"""Processes that turn chunks into ids.

They are programs of their own, spoken to over pipes: no fork of a process that has tokenized, which can hang, and no
second import of the caller's script. A process whose pipe ends has been left by the one it works for, and leaves too.
"""

import os
import pickle
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeVar

from bertship.errors import CheckFailed
from bertship.tokenization import Tokenizer
from train.chunks import Chunk
from train.encode import Encoded, Encoder, words_of
from train.inputs import Input
from train.readers import records_named

Job = TypeVar("Job")
_ROOT = Path(__file__).parents[1]


class Workers:
    """Takes chunks and gives results in the order of the chunks."""

    def __init__(self, count: int, tokenizer_dir: Path, language: str, text_field: str, seed: int) -> None:
        """`count` 0: everything is done in this process. The tokenizer is not read before something is encoded."""
        self._count = count
        self._work = _Work(tokenizer_dir, language, text_field, seed)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._mine = threading.local()  # the process that a thread speaks to
        self._threads = ThreadPoolExecutor(count, initializer=self._start) if count else None

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        if self._threads:
            self._threads.shutdown(wait=False, cancel_futures=True)
            for process in self._processes:
                process.kill()
            self._threads.shutdown(wait=True)
            for process in self._processes:
                process.communicate()  # closes the pipes and waits

    def encode(self, jobs: Iterable[tuple[Job, Input, Chunk | None]]) -> Iterator[tuple[Job, Encoded | None]]:
        """Each job with its chunk's ids, None where it has no chunk. Raises InputError, CheckFailed."""
        return self._in_order("encode", jobs)

    def count(self, jobs: Iterable[tuple[Job, Input, Chunk]]) -> Iterator[tuple[Job, Counter[str]]]:
        """Each job with the words of its chunk. Raises InputError, CheckFailed."""
        return self._in_order("count", jobs)

    def _in_order(self, what: str, jobs: Iterable[tuple[Job, Input, Chunk | None]]) -> Iterator[tuple[Job, Any]]:
        waiting: deque[tuple[Job, Input, Future[Any] | None]] = deque()
        for job, item, chunk in jobs:
            if self._threads is None:
                with records_named(item):
                    result = self._work(what, chunk) if chunk else None
                yield job, result
                continue
            waiting.append((job, item, self._threads.submit(self._ask, what, chunk) if chunk else None))
            if len(waiting) > 2 * self._count:
                yield _result(*waiting.popleft())
        while waiting:
            yield _result(*waiting.popleft())

    def _start(self) -> None:
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        self._mine.process = subprocess.Popen(
            [sys.executable, "-c", "from train.workers import work; work()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},  # one core
            start_new_session=True,  # a Ctrl-C is meant for this process
        )
        self._processes.append(self._mine.process)
        self._mine.begun = False

    def _ask(self, what: str, chunk: Chunk) -> Any:
        process = self._mine.process
        try:
            if not self._mine.begun:
                _send(process.stdin, self._work)
                self._mine.begun = True
            _send(process.stdin, (what, chunk))
            result, error = pickle.load(process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            raise CheckFailed(
                "a tokenizing process was killed, perhaps for want of memory; start again, with fewer --workers: it "
                "goes on where it was"
            ) from None
        if error is not None:
            raise error
        return result


class _Work:
    """What is done with a chunk, here or in another process."""

    def __init__(self, tokenizer_dir: Path, language: str, text_field: str, seed: int) -> None:
        self._settings = (tokenizer_dir, language, text_field, seed)
        self._encoder: Encoder | None = None

    def __getstate__(self) -> Any:
        return {"_settings": self._settings, "_encoder": None}

    def __call__(self, what: str, chunk: Chunk) -> Any:
        tokenizer_dir, language, text_field, seed = self._settings
        if what == "count":
            return words_of(chunk, text_field)
        if self._encoder is None:
            self._encoder = Encoder(Tokenizer.from_dir(tokenizer_dir), language, text_field, seed)
        return self._encoder.encode(chunk)


def work() -> None:
    """The program of a process: chunks from stdin, results to what was stdout, until stdin ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints
    questions = sys.stdin.buffer
    try:
        do: Callable[[str, Chunk], Any] = pickle.load(questions)
        while True:
            what, chunk = pickle.load(questions)
            answer: tuple[Any, Exception | None]
            try:
                answer = do(what, chunk), None
            except Exception as error:
                answer = None, error
            _send(answers, answer)
    except (EOFError, BrokenPipeError, pickle.UnpicklingError):  # the other side has left
        os._exit(0)


def _send(pipe: IO[bytes], message: Any) -> None:
    pickle.dump(message, pipe, pickle.HIGHEST_PROTOCOL)
    pipe.flush()


def _result(job: Job, item: Input, future: "Future[Any] | None") -> tuple[Job, Any]:
    if future is None:
        return job, None
    with records_named(item):
        return job, future.result()
