"""The three steps of a task's ensemble inside Triton: tokenize, encode, decode.

A repository's `1/model.py` takes its class from here. A step finds what it needs beside that file: `task.json`, and
`tokenizer.json` or `model.onnx`. Every fault of a request becomes an INVALID_ARG error of that request alone.
"""

import json
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from bertship.errors import InputError
from bertship.pipeline import check_columns, check_size, encode
from bertship.runners import OnnxRunner
from bertship.tasks.base import Task, TensorSpec, read_options, row_table
from bertship.tokenization import Row, Tokenizer, pad

_NUMPY = {"BOOL": bool, "BYTES": object, "FP32": np.float32, "INT32": np.int32, "INT64": np.int64}


class _Step:
    """What the steps share: the version's folder and what is in it."""

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
        self.folder = Path(args["model_repository"]) / args["model_version"]
        parameters = json.loads(args["model_config"]).get("parameters", {})
        self.parameters = {name: value["string_value"] for name, value in parameters.items()}
        try:
            self.task = Task.from_file(self.folder / "task.json")
            self.load()
        except (InputError, OSError) as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def load(self) -> None:
        """Read what the step needs; InputError when it is not there."""


class _RequestStep(_Step, ABC):
    """A step that answers each request by itself."""

    @abstractmethod
    def answer(self, request: Any) -> dict[str, np.ndarray]:
        """The response's tensors by name. Raises InputError for what the request got wrong."""

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        try:
            tensors = [pb_utils.Tensor(name, value) for name, value in self.answer(request).items()]
        except InputError as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG))
        return pb_utils.InferenceResponse(output_tensors=tensors)


class TokenizeStep(_RequestStep):
    """Texts to rows, and to what the decoding step needs to know of them."""

    def load(self) -> None:
        self.tokenizer = Tokenizer.from_file(self.folder / "tokenizer.json")
        self.max_rows = int(self.parameters["max_rows"])
        self.buckets = [int(length) for length in self.parameters.get("pad_to", "").split(",") if length]
        encode(self.task, self.tokenizer, {name: ["warm"] for name in self.task.behaviour.inputs})

    def answer(self, request: Any) -> dict[str, np.ndarray]:
        columns = _texts(self.task, request)
        check_columns(self.task, columns)
        check_size(self.task, columns)
        read_options(self.task, _parameters(request))  # a bad parameter is refused before the encoder runs
        encoded = encode(self.task, self.tokenizer, columns)
        if len(encoded.rows) > self.max_rows:
            raise InputError(
                f"{self.task.name}: the request makes {len(encoded.rows):,} rows of up to {self.task.max_tokens} "
                f"tokens; at most {self.max_rows:,} are allowed, send fewer or shorter texts"
            )
        longest = max(map(len, encoded.rows))
        length = next((bucket for bucket in self.buckets if bucket >= longest), longest)
        return {
            **pad(encoded.rows, self.tokenizer.pad_id, length),
            **row_table(self.task.behaviour, encoded.rows),
            "TRUNCATED": encoded.truncated,
        }


class EncodeStep(_Step):
    """Rows of all waiting requests through the encoder, unpadded, and back to their requests."""

    def load(self) -> None:
        threads = int(self.parameters["threads"]) if "threads" in self.parameters else None
        self.runner = OnnxRunner(self.folder / "model.onnx", threads)
        self.specs = self.task.behaviour.logits(self.task)
        self.runner.warm_up((8, self.task.max_tokens // 2, self.task.max_tokens))

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        rows: list[Row] = []
        shapes = []
        for request in requests:
            ids, mask, types = (_array(request, name) for name in OnnxRunner.INPUTS)
            for length, row_ids, row_types in zip(mask.sum(axis=1), ids, types, strict=True):
                rows.append(Row(row_ids[: max(length, 1)], row_types[: max(length, 1)]))
            shapes.append(ids.shape)
        logits = self.runner(rows)
        responses, start = [], 0
        for count, tokens in shapes:
            part = slice(start, start + count)
            start += count
            responses.append(
                pb_utils.InferenceResponse(
                    [pb_utils.Tensor(s.name, _stack(s, logits[s.name][part], tokens)) for s in self.specs]
                )
            )
        return responses

    def finalize(self) -> None:
        self.runner.close()


class DecodeStep(_RequestStep):
    """Logits to answers."""

    def answer(self, request: Any) -> dict[str, np.ndarray]:
        kind = self.task.behaviour
        table = {spec.name: _array(request, spec.name) for spec in kind.row_tensors}
        logits = {spec.name: _array(request, spec.name) for spec in kind.logits(self.task)}
        columns = _texts(self.task, request) if kind.row_tensors else {}
        answers = kind.decode(self.task, columns, table, logits, read_options(self.task, _parameters(request)))
        return {spec.name: _as_triton(answers[spec.name], spec) for spec in kind.outputs(self.task)}


def _array(request: Any, name: str) -> np.ndarray:
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()


def _texts(task: Task, request: Any) -> dict[str, list[str]]:
    """The request's texts. Raises InputError for bytes that are not UTF-8."""
    columns = {}
    for name in task.behaviour.inputs:
        texts = []
        for i, raw in enumerate(_array(request, name).ravel()):
            try:
                texts.append(raw.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{task.name}: {name}[{i}] is not UTF-8 at byte {error.start} (0x{raw[error.start]:02x}); "
                    "encode texts as UTF-8"
                ) from None
        columns[name] = texts
    return columns


def _parameters(request: Any) -> dict[str, Any]:
    return json.loads(request.parameters() or "{}")


def _stack(spec: TensorSpec, rows: Sequence[np.ndarray], tokens: int) -> np.ndarray:
    """Rows' logits as one array; token-wise ones are padded to the request's own row length."""
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
