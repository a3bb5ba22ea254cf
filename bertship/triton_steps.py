"""The three steps of a task's ensemble inside Triton: tokenize, encode, decode.

A repository's `1/model.py` takes its class from here. A step finds what it needs beside that file: `task.json`, and
`tokenizer.json` or `model.onnx`. Every fault of a request becomes an INVALID_ARG error of that request alone.
"""

import contextlib
import json
import secrets
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from bertship.errors import InputError, seen
from bertship.pipeline import check_columns, check_size, encode
from bertship.runners import OnnxRunner
from bertship.tasks.base import Task, TensorSpec, read_options, row_table
from bertship.tokenization import Row, Tokenizer, pad
from bertship.triton_limits import LONG_CHARACTERS, TURN_TOKENS
from bertship.triton_metrics import Counters
from bertship.triton_turns import Work

_NUMPY = {"BOOL": bool, "BYTES": object, "FP32": np.float32, "INT32": np.int32, "INT64": np.int64}
_CONTINUE = "bertship_continue"  # the parameter of a request that only asks for a carried-over request's next turn


class _Step:
    """What the steps share: the version's folder and what is in it."""

    counted: tuple[str, ...] = ()

    def __init_subclass__(cls) -> None:
        """An exception that no step expects goes into Triton's log: without its words, which may hold a text."""
        super().__init_subclass__()
        if execute := cls.__dict__.get("execute"):

            def guarded(self: Any, requests: Sequence[Any]) -> Any:
                try:
                    return execute(self, requests)
                except Exception as error:
                    kind, place = type(error).__name__, traceback.extract_tb(error.__traceback__)[-1]
                    said = f"{kind} at {Path(place.filename).name}:{place.lineno} in {place.name}"
                raise pb_utils.TritonModelException(said)

            cls.execute = guarded  # type: ignore[attr-defined]

    def initialize(self, args: Mapping[str, str]) -> None:
        self.model, self.version = args.get("model_name", ""), int(args["model_version"])
        self.folder = Path(args["model_repository"]) / args["model_version"]
        config = json.loads(args["model_config"])
        self.parameters = {name: value["string_value"] for name, value in config.get("parameters", {}).items()}
        self.types = {output["name"]: output["data_type"].removeprefix("TYPE_") for output in config.get("output", ())}
        try:
            self.task = Task.from_file(self.folder / "task.json")
            self.load()
        except (InputError, OSError) as error:
            raise pb_utils.TritonModelException(str(error)) from None
        self.counters = Counters(self.task.name, self.version, self.counted)

    def load(self) -> None:
        """Read what the step needs; InputError when it is not there."""

    def finalize(self) -> None:
        self.counters.close()


class _RequestStep(_Step, ABC):
    """A step that answers each request by itself, long ones on a thread of their own beside the others."""

    @abstractmethod
    def read(self, request: Any) -> dict[str, Any]:
        """What the request holds: its tensors, texts and options. Raises InputError."""

    @abstractmethod
    def answer(self, given: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The response's tensors by name for what `read` returned. Raises InputError for what the request got wrong."""

    def load(self) -> None:
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long")
        # a long request computes in Python beside short ones: let go of the interpreter often
        sys.setswitchinterval(5e-4)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        try:
            given = self.read(request)
        except InputError as error:
            return self._refused(error)
        if sum(len(text) for texts in given.get("columns", {}).values() for text in texts) <= LONG_CHARACTERS:
            return self._response(given)
        send = _sending(request.get_response_sender())
        given = {name: _kept(value) for name, value in given.items()}
        self._long.submit(lambda: send(self._response(given)))
        return None

    def _response(self, given: dict[str, Any]) -> Any:
        try:
            tensors = [pb_utils.Tensor(name, value) for name, value in self.answer(given).items()]
        except InputError as error:
            return self._refused(error)
        except Exception as error:  # on another thread nobody would answer
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"{self.model}: {_one_line(error)}"))
        return pb_utils.InferenceResponse(output_tensors=tensors)

    def _refused(self, error: InputError) -> Any:
        self.counters.add(refused_requests=1)
        return _invalid(str(error))

    def finalize(self) -> None:
        self._long.shutdown()
        super().finalize()


class TokenizeStep(_RequestStep):
    """Texts to rows, and to what the decoding step needs to know of them."""

    counted = ("texts", "rows", "tokens", "padding_tokens", "truncated_texts", "refused_requests")

    def load(self) -> None:
        super().load()
        self.request = self.task.behaviour.request()
        self.tokenizer = Tokenizer.from_file(self.folder / "tokenizer.json")
        self.max_rows = int(self.parameters["max_rows"])
        # the padding of native backends, which compute it; the embedded encoder drops it
        self.buckets = [int(length) for length in self.parameters.get("pad_to", "").split(",") if length]
        warm = {spec.name: ["warm"] if len(spec.dims) == 1 else [["warm"] * 2] for spec in self.request}
        encode(self.task, self.tokenizer, warm)

    def read(self, request: Any) -> dict[str, Any]:
        columns = _texts(self.task, self.request, request)
        check_columns(self.task, columns)
        check_size(self.task, columns)
        read_options(self.task, _parameters(request))  # a bad parameter is refused before the encoder runs
        return {"columns": columns}

    def answer(self, given: Mapping[str, Any]) -> dict[str, np.ndarray]:
        encoded = encode(self.task, self.tokenizer, given["columns"])
        if len(encoded.rows) > self.max_rows:
            raise InputError(
                f"{self.task.name}: the request makes {len(encoded.rows):,} rows of up to {self.task.max_tokens} "
                f"tokens; at most {self.max_rows:,} are allowed, send fewer or shorter texts"
            )
        lengths = [len(row) for row in encoded.rows]
        longest = max(lengths)
        length = next((bucket for bucket in self.buckets if bucket >= longest), longest)
        inputs = pad(encoded.rows, self.tokenizer.pad_id, length)
        self.counters.add(
            texts=len(encoded.truncated),
            rows=len(lengths),
            tokens=sum(lengths),
            padding_tokens=length * len(lengths) - sum(lengths) if self.buckets else 0,
            truncated_texts=int(np.count_nonzero(encoded.truncated)),
        )
        return {
            **{n: value.astype(_NUMPY[self.types.get(n, "INT64")], copy=False) for n, value in inputs.items()},
            **row_table(self.task.behaviour, encoded.rows),
            "TRUNCATED": encoded.truncated,
        }


class EncodeStep(_Step):
    """Rows of all waiting requests through the encoder, unpadded, and back to their requests.

    A request with more rows than its turn (`bertship.triton_turns`) is answered by a later execution. Until then it
    asks for that execution itself, through Triton's own queue: so it waits its turn among the other requests of its
    task, and at Triton's rate limiter among the other tasks.
    """

    counted = ("executions", "execution_requests", "execution_rows")

    def load(self) -> None:
        threads = int(self.parameters["threads"]) if "threads" in self.parameters else None
        self.runner = OnnxRunner(self.folder / "model.onnx", threads)
        self.specs = self.task.behaviour.logits(self.task)
        self.runner.warm_up((8, self.task.max_tokens // 2, self.task.max_tokens))
        self.carried: dict[str, Work] = {}
        self.running = threading.Lock()
        self.asking = ThreadPoolExecutor(32, thread_name_prefix="turn")

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        with self.running:
            return self._execute(requests)

    def _execute(self, requests: Sequence[Any]) -> list[Any]:
        responses: list[Any] = [None] * len(requests)
        works: list[Work] = []
        new: dict[int, Any] = {}  # requests by their place in `works`
        for i, request in enumerate(requests):
            key = _parameters(request).get(_CONTINUE)
            if key is None:
                new[len(works)] = request
                works.append(self._read(request))
                works[-1].answer = partial(responses.__setitem__, i)
            elif key in self.carried:
                works.append(self.carried.pop(key))
                responses[i] = self._nothing()
            else:  # failed meanwhile, or a key that is not ours
                responses[i] = _invalid(f"{self.model}: no request is carried over as {seen(key, 40)}")
        turns = [(work, work.turn(TURN_TOKENS * self.runner.threads, self.runner.threads)) for work in works]
        ending = [(work, rows) for work, rows in turns if len(rows) == work.left]
        going_on = [(work, rows) for work, rows in turns if len(rows) < work.left]
        if going_on:  # then those that end need not wait for the end of this execution
            for place, request in new.items():
                works[place].answer = _sending(request.get_response_sender())
        for work, _ in going_on:
            work.keep()
            # asked for before this turn runs, so that the next execution is there when it ends
            self._carry(work)
        self._run(ending)
        self._run(going_on)
        rows_run = sum(len(rows) for _, rows in turns)
        self.counters.add(executions=1, execution_requests=len(turns), execution_rows=rows_run)
        return responses

    def _read(self, request: Any) -> Work:
        ids, mask, types = (_array(request, name) for name in OnnxRunner.INPUTS)
        lengths = [max(1, np.count_nonzero(row)) for row in mask]
        rows = [Row(i[:length], t[:length]) for length, i, t in zip(lengths, ids, types, strict=True)]
        return Work(rows, ids.shape[1])

    def _run(self, turns: Sequence[tuple[Work, Sequence[Row]]]) -> None:
        """One turn of each request; those that end with it are answered."""
        rows = [row for _, part in turns for row in part]
        try:
            logits = self.runner(rows)
        except Exception as error:  # a row that the graph refuses: ids or lengths of a request that knew better
            if len(turns) > 1:
                for turn in turns:
                    self._run([turn])
                return
            # answered in any case: a carried one would else never be
            failed = pb_utils.InferenceResponse(error=pb_utils.TritonError(f"{self.model}: {_one_line(error)}"))
            for work, _ in turns:
                self.carried = {key: other for key, other in self.carried.items() if other is not work}
                work.answer(failed)
            return
        start = 0
        for work, part in turns:
            work.add({name: values[start : start + len(part)] for name, values in logits.items()})
            start += len(part)
            if not work.left:
                work.answer(
                    pb_utils.InferenceResponse(
                        [pb_utils.Tensor(s.name, _stack(s, work.done[s.name], work.tokens)) for s in self.specs]
                    )
                )

    def _carry(self, work: Work) -> None:
        key = secrets.token_hex(8)
        self.carried[key] = work
        self.asking.submit(self._ask_for_turn, key)

    def _ask_for_turn(self, key: str) -> None:
        """Queue for the next turn like any other request; where the queue takes no more, finish without it."""
        zeros = np.zeros((1, 1), np.int64)
        with contextlib.suppress(Exception):  # whatever it is, the request still has its answer to get
            response = pb_utils.InferenceRequest(
                model_name=self.model,
                model_version=self.version,
                inputs=[pb_utils.Tensor(name, zeros) for name in OnnxRunner.INPUTS],
                requested_output_names=[spec.name for spec in self.specs],
                parameters={_CONTINUE: key},
            ).exec()
            if not response.has_error():
                return
        # a queue that is full, or a version that is being unloaded, still owes this request its answer
        while True:
            with self.running:
                work = self.carried.pop(key, None)
                if work is None:
                    return
                rows = work.turn(TURN_TOKENS * self.runner.threads, self.runner.threads)
                if len(rows) < work.left:
                    self.carried[key] = work
                self._run([(work, rows)])

    def _nothing(self) -> Any:
        """The reply to a request that only asked for a turn."""
        shapes = {s.name: (1, *(1 if d == -1 else d for d in s.dims)) for s in self.specs}
        return pb_utils.InferenceResponse([pb_utils.Tensor(n, np.zeros(s, np.float32)) for n, s in shapes.items()])

    def finalize(self) -> None:
        self.asking.shutdown()
        self.runner.close()
        super().finalize()


class DecodeStep(_RequestStep):
    """Logits to answers."""

    counted = ("refused_requests",)

    def load(self) -> None:
        super().load()
        kind = self.task.behaviour
        self.request = kind.request() if kind.row_tensors else ()
        self.table, self.logits, self.outputs = kind.row_tensors, kind.logits(self.task), kind.outputs(self.task)

    def read(self, request: Any) -> dict[str, Any]:
        return {
            "columns": _texts(self.task, self.request, request),
            "table": {spec.name: _array(request, spec.name) for spec in self.table},
            "logits": {spec.name: _array(request, spec.name) for spec in self.logits},
            "options": read_options(self.task, _parameters(request)),
        }

    def answer(self, given: Mapping[str, Any]) -> dict[str, np.ndarray]:
        answers = self.task.behaviour.decode(self.task, **given)
        return {spec.name: _as_triton(answers[spec.name], spec) for spec in self.outputs}


def _kept(value: Any) -> Any:
    """Arrays of a request as copies: its memory is the server's again once `execute` has returned."""
    return {name: np.array(v) if isinstance(v, np.ndarray) else v for name, v in value.items()}


def _sending(sender: Any) -> Callable[[Any], None]:
    return lambda response: sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _invalid(message: str) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG))


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _array(request: Any, name: str) -> np.ndarray:
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()


def _texts(task: Task, specs: Sequence[TensorSpec], request: Any) -> dict[str, list[Any]]:
    """The request's texts, in lists as deep as their tensors. Raises InputError for bytes that are not UTF-8."""
    columns: dict[str, list[Any]] = {}
    for spec in specs:
        raw = _array(request, spec.name)
        if len(spec.dims) == 1:
            columns[spec.name] = [_decoded(task, f"{spec.name}[{i}]", text) for i, text in enumerate(raw.ravel())]
        else:
            columns[spec.name] = [
                [_decoded(task, f"{spec.name}[{i}][{j}]", text) for j, text in enumerate(texts)]
                for i, texts in enumerate(raw)
            ]
    return columns


def _decoded(task: Task, where: str, raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{task.name}: {where} is not UTF-8 at byte {error.start} (0x{raw[error.start]:02x}); encode texts as UTF-8"
        ) from None


def _parameters(request: Any) -> dict[str, Any]:
    given = request.parameters()
    return json.loads(given) if given and given != "{}" else {}


def _stack(spec: TensorSpec, rows: Sequence[np.ndarray], tokens: int) -> np.ndarray:
    """Rows' logits as one array; token-wise ones are padded to the request's own row length."""
    if len(rows) == 1 and len(rows[0]) == (spec.dims[0] if spec.dims[0] != -1 else tokens):
        return np.asarray(rows[0], np.float32)[None]
    if spec.dims[0] != -1:
        return np.stack(rows).astype(np.float32, copy=False)
    stacked = np.zeros((len(rows), tokens, *rows[0].shape[1:]), np.float32)
    for padded, row in zip(stacked, rows, strict=True):
        padded[: len(row)] = row
    return stacked


def _as_triton(value: np.ndarray, spec: TensorSpec) -> np.ndarray:
    if spec.datatype == "BYTES":
        return np.array([text.encode("utf-8") for text in value], object)
    return value.astype(_NUMPY[spec.datatype], copy=False)
