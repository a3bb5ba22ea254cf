"""Precision lives in the graph: FP16 and INT8 are rewritten from the FP32 graph, with FP32 inputs and outputs."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnxruntime.transformers.float16 import convert_float_to_float16

from bertship.errors import CheckFailed
from bertship.tokenization import Row
from export.int8 import Recipe
from export.int8_recipe import choose, rewritten
from export.onnx_graph import check_graph, quiet

FLOAT = onnx.TensorProto.FLOAT
FP16_LARGEST = float(np.finfo(np.float16).max)
CPUINFO = Path("/proc/cpuinfo")
RECIPE = "bertship.int8"  # the key of an INT8 graph's own description


def to_fp16(source: Path, target: Path) -> None:
    """Weights and arithmetic in FP16; inputs and outputs keep their types. Raises CheckFailed for larger weights."""
    model = onnx.load(source)
    for tensor in model.graph.initializer:
        if tensor.data_type == FLOAT and (largest := float(np.abs(numpy_helper.to_array(tensor)).max())) > FP16_LARGEST:
            raise CheckFailed(
                f"weight {tensor.name} reaches {largest:.3g}, FP16 ends at {FP16_LARGEST:g}; leave fp16 out"
            )
    with quiet():
        graph = convert_float_to_float16(model, keep_io_types=True, max_finite_val=FP16_LARGEST)
    onnx.save(graph, target)
    check_graph(target)


def to_int8(source: Path, target: Path, rows: Sequence[Row] = ()) -> None:
    """Weights and activations in INT8 as `export.int8` has them; FP32 in and out.

    `rows` are real text, from which the recipe is chosen (`export.int8_recipe`); without them each token has its own
    scale and nothing else is known. `read_recipe` says what was chosen.
    Processors without VNNI add INT8 products in 16 bits and saturate, hence 7-bit weights there.
    """
    model, limit = onnx.load(source), 127 if has_vnni() else 63
    choice = choose(model, rows, limit) if len(rows) else None
    model = rewritten(model, choice.recipe if choice else Recipe(), limit)
    facts = {
        "calibration_rows": len(rows),
        "weight_bits": limit.bit_length() + 1,
        **(choice.as_dict() if choice else {}),
    }
    onnx.helper.set_model_props(model, {RECIPE: json.dumps(facts)})
    onnx.save(model, target)
    check_graph(target)


def read_recipe(path: Path) -> dict[str, Any]:
    """How the INT8 graph at `path` was made: calibration rows, bits of a weight, layers in FP32, expected changes."""
    properties = {entry.key: entry.value for entry in onnx.load(path, load_external_data=False).metadata_props}
    return json.loads(properties[RECIPE]) if RECIPE in properties else {}


def has_vnni() -> bool:
    """Whether the processor adds INT8 products in 32 bits (AVX-512 VNNI, AVX VNNI or AMX)."""
    flags = CPUINFO.read_text(encoding="utf-8")
    return any(name in flags for name in ("avx512_vnni", "avx_vnni", "amx_int8"))


@dataclass(frozen=True)
class Precision:
    """How a precision is made and what the gate asks of it.

    `max_difference`: largest allowed difference of a logit from PyTorch FP32, as a share of the logits' largest
    magnitude; `agreement`: smallest allowed share of equal decisions; `narrow`: whether the values between the nodes
    have to fit its type, which a CPU that computes in FP32 would not notice.
    """

    file: str
    make: Callable[[Path, Path], None] | None
    max_difference: float
    agreement: float
    narrow: bool = False


PRECISIONS = {
    "fp32": Precision("model.onnx", None, 1e-4, 1.0),
    "fp16": Precision("model.fp16.onnx", to_fp16, 2e-2, 0.995, narrow=True),
    "int8": Precision("model.int8.onnx", to_int8, 0.3, 0.98),
}


def best_for_cpu() -> str:
    """The precision that serves fastest on this processor."""
    return "int8" if has_vnni() else "fp32"
