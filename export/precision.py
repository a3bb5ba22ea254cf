"""Precision lives in the graph: FP16 and INT8 are rewritten from the FP32 graph, with FP32 inputs and outputs."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.transformers.float16 import convert_float_to_float16

from export.onnx_graph import quiet


def to_fp16(source: Path, target: Path) -> None:
    """Weights and arithmetic in FP16; inputs and outputs keep their types."""
    with quiet():
        graph = convert_float_to_float16(onnx.load(source), keep_io_types=True)
    onnx.save(graph, target)
    onnx.checker.check_model(str(target), full_check=True)


def to_int8(source: Path, target: Path) -> None:
    """Weights in INT8, one scale a channel; activations are quantized as they come, one scale a tensor.

    A scale a tensor means that rows of one batch would change each other, so this graph is run row by row.
    Processors without VNNI add INT8 products in 16 bits and saturate, hence 7-bit weights there.
    """
    with quiet():
        quantize_dynamic(source, target, per_channel=True, weight_type=QuantType.QInt8, reduce_range=not has_vnni())
    onnx.checker.check_model(str(target), full_check=True)


def has_vnni() -> bool:
    """Whether the processor adds INT8 products in 32 bits (AVX-512 VNNI, AVX VNNI or AMX)."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return any(name in flags for name in ("avx512_vnni", "avx_vnni", "amx_int8"))


@dataclass(frozen=True)
class Precision:
    """How a precision is made and what the gate asks of it.

    `max_difference`: largest allowed difference of a logit from PyTorch FP32, as a share of the logits' largest
    magnitude; `agreement`: smallest allowed share of equal decisions; `as_served`: rows run alone, as its scales ask.
    """

    file: str
    make: Callable[[Path, Path], None] | None
    max_difference: float
    agreement: float
    as_served: bool = False


PRECISIONS = {
    "fp32": Precision("model.onnx", None, 1e-4, 1.0),
    "fp16": Precision("model.fp16.onnx", to_fp16, 2e-2, 0.995),
    "int8": Precision("model.int8.onnx", to_int8, 0.5, 0.98, as_served=True),
}


def best_for_cpu() -> str:
    """The precision that serves fastest on this processor."""
    return "int8" if has_vnni() else "fp32"
