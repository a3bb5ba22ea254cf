"""Precision lives in the graph: FP16 and INT8 are rewritten from the FP32 graph, with FP32 inputs and outputs."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from bertship.processor import INT8, has_vnni
from bertship.tokenization import Row
from export.fp16 import to_fp16
from export.int8 import Recipe
from export.int8_recipe import Search, rewritten
from export.onnx_graph import check_graph
from export.qdq import to_int8_qdq

ALLOWED = (1.0, 0.85, 0.7, 0.5, 0.35, 0.2)  # of what a recipe may change: the next one where the gate refuses


def to_int8(source: Path, target: Path, rows: Sequence[Row] = ()) -> None:
    """The first of `int8_attempts`."""
    next(int8_attempts(source, target, rows))


def int8_attempts(source: Path, target: Path, rows: Sequence[Row] = (), judged: Sequence[Row] = ()) -> Iterator[None]:
    """Weights and activations in INT8 as `export.int8` has them; FP32 in and out.

    `rows` are real text, from which the recipe is chosen (`export.int8_recipe`); without them each token has its own
    scale and nothing else is known. `judged` are other text, best such that the model was not trained on.
    `read_recipe` says what was chosen.
    Processors without VNNI add INT8 products in 16 bits and saturate, hence 7-bit weights there.
    Each time that it is asked to go on, it writes `target` again with less error and less of the speed.
    """
    model, limit = onnx.load(source), 127 if has_vnni() else 63
    if not len(rows):
        _write_int8(rewritten(model, Recipe(), limit), target, limit, 0, {})
        yield
        return
    search = Search(model, rows, limit, judged)
    before: Recipe | None = None
    for allowed in ALLOWED:
        choice = search.find(allowed)
        if choice.recipe is not before:
            _write_int8(rewritten(model, choice.recipe, limit), target, limit, len(rows), choice.as_dict())
            yield
        before = choice.recipe


def _write_int8(model: Any, target: Path, limit: int, rows: int, choice: dict[str, Any]) -> None:
    facts = {"calibration_rows": rows, "weight_bits": limit.bit_length() + 1, **choice}
    onnx.helper.set_model_props(model, {INT8: json.dumps(facts)})
    onnx.save(model, target)
    check_graph(target)


def read_recipe(path: Path) -> dict[str, Any]:
    """How the INT8 graph at `path` was made: calibration rows, bits of a weight, layers in FP32, expected changes."""
    properties = {entry.key: entry.value for entry in onnx.load(path, load_external_data=False).metadata_props}
    return json.loads(properties[INT8]) if INT8 in properties else {}


@dataclass(frozen=True)
class Precision:
    """How a precision is made; `export.tolerances` says what the gate asks of it.

    `narrow`: whether the values between the nodes have to fit FP16, which a CPU that computes in FP32 would not notice;
    `half`: whether the model itself is judged in half precision too.
    """

    file: str
    make: Callable[..., None] | None  # source, target and, where `calibrated`, rows of real text
    # source, target, rows of real text and others to judge by: again and again, for as long as the gate refuses
    attempts: Callable[..., Iterator[None]] | None = None
    narrow: bool = False
    half: bool = False
    calibrated: bool = False
    needs_tensorrt: bool = False  # of use to TensorRT alone: `auto` makes it where that is


PRECISIONS = {
    "fp32": Precision("model.onnx", None),
    "fp16": Precision("model.fp16.onnx", to_fp16, narrow=True, half=True, calibrated=True),
    "int8": Precision("model.int8.onnx", to_int8, int8_attempts, calibrated=True),
    "int8_qdq": Precision("model.int8.qdq.onnx", to_int8_qdq, narrow=True, calibrated=True, needs_tensorrt=True),
}
