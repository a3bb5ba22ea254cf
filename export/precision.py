"""Precision lives in the graph: FP16 and INT8 are rewritten from the FP32 graph, with FP32 inputs and outputs."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST, convert_float_to_float16
from onnxruntime.transformers.onnx_model import OnnxModel

from bertship.errors import CheckFailed
from export.onnx_graph import check_graph, quiet

FLOAT = onnx.TensorProto.FLOAT
NARROWEST_INT8 = 32  # columns: a head of few labels has little to gain and most to lose
FP32_ONLY = ("LSTM",)  # ONNX Runtime has no FP16 kernel of it on a CPU
FP16_LARGEST = float(np.finfo(np.float16).max)


def to_fp16(source: Path, target: Path) -> None:
    """Weights and arithmetic in FP16; inputs and outputs keep their types. Raises CheckFailed for larger weights."""
    model = onnx.load(source)
    for tensor in model.graph.initializer:
        if tensor.data_type == FLOAT and (largest := float(np.abs(numpy_helper.to_array(tensor)).max())) > FP16_LARGEST:
            raise CheckFailed(
                f"weight {tensor.name} reaches {largest:.3g}, FP16 ends at {FP16_LARGEST:g}; leave fp16 out"
            )
    with quiet():
        graph = convert_float_to_float16(
            model, keep_io_types=True, max_finite_val=FP16_LARGEST, op_block_list=[*DEFAULT_OP_BLOCK_LIST, *FP32_ONLY]
        )
    OnnxModel.graph_topological_sort(graph.graph)  # casts around nodes that stay in FP32 come last otherwise
    onnx.save(graph, target)
    check_graph(target)


def to_int8(source: Path, target: Path) -> None:
    """Weights in INT8, one scale a column; activations too, one scale a token, found as they come.

    A scale a tensor, which `quantize_dynamic` gives, would follow the largest value of any token: that of [SEP] costs
    all others their precision, and rows of one batch change each other. Embeddings have one scale a piece. What is
    left in FP32 is small: attention between tokens, LayerNorm, the pooler and heads of few labels.
    Processors without VNNI add INT8 products in 16 bits and saturate, hence 7-bit weights there.
    """
    model = onnx.load(source)
    _quantize(model.graph, limit=127 if has_vnni() else 63)
    onnx.save(model, target)
    check_graph(target)


def _quantize(graph: Any, limit: int) -> None:
    """Rewrite, in place, each MatMul with a constant and each lookup; integers of weights are within +-`limit`.

    Written as QuantizeLinear and DequantizeLinear around a plain MatMul, the form that runtimes fuse.
    """
    constants = {tensor.name: tensor for tensor in graph.initializer}
    added = [
        numpy_helper.from_array(np.array([-1], np.int64), "int8_axis"),
        numpy_helper.from_array(np.array(1 / 127, np.float32), "int8_scale"),
        numpy_helper.from_array(np.array(128, np.uint8), "int8_zero"),
    ]
    nodes: list[Any] = []
    replaced: set[str] = set()
    tokens: set[str] = set()  # activations that are quantized already: query, key and value share theirs

    def add(kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        nodes.append(onnx.helper.make_node(kind, inputs, [output], name=f"{kind}_{output}", **attributes))
        return output

    def store(name: str, axis: int, most: int) -> tuple[str, str]:
        """The constant as INT8 with one scale for each index but those of `axis`."""
        weight = numpy_helper.to_array(constants[name])
        largest = np.abs(weight).max(axis=axis, keepdims=True)
        scale = np.where(largest > 0, largest / most, 1).astype(np.float32)
        if name not in replaced:
            integers = np.clip(np.rint(weight / scale), -most, most).astype(np.int8)
            scales = scale if axis else scale[0]
            added.extend(
                numpy_helper.from_array(array, f"{name}_{suffix}")
                for suffix, array in (("int8", integers), ("scale", scales))
            )
            replaced.add(name)
        return f"{name}_int8", f"{name}_scale"

    for node in graph.node:
        if (
            node.op_type == "MatMul"
            and node.input[1] in constants
            and constants[node.input[1]].dims[-1] >= NARROWEST_INT8
        ):
            x, weight, y = node.input[0], node.input[1], node.output[0]
            if x not in tokens:
                tokens.add(x)
                add("ReduceMax", [add("Abs", [x], f"{x}_abs"), "int8_axis"], f"{x}_largest", keepdims=1)
                # 0 / 0 for a token of zeros becomes some integer, and 0 again when multiplied by its largest value
                shares = add("Div", [x, f"{x}_largest"], f"{x}_shares")
                add("QuantizeLinear", [shares, "int8_scale", "int8_zero"], f"{x}_uint8")
            left = add("DequantizeLinear", [f"{x}_uint8", "int8_scale", "int8_zero"], f"{y}_left")
            right = add("DequantizeLinear", list(store(weight, 0, limit)), f"{y}_right", axis=1)
            add("Mul", [add("MatMul", [left, right], f"{y}_shares"), f"{x}_largest"], y)
        elif node.op_type == "Gather" and node.input[0] in constants and len(constants[node.input[0]].dims) == 2:
            y, (integers, scales) = node.output[0], store(node.input[0], 1, 127)
            row = add("Cast", [add("Gather", [integers, node.input[1]], f"{y}_int8")], f"{y}_cast", to=FLOAT)
            add("Mul", [row, add("Gather", [scales, node.input[1]], f"{y}_scale")], y)
        else:
            nodes.append(node)
    kept = [tensor for tensor in graph.initializer if tensor.name not in replaced]
    del graph.node[:], graph.initializer[:], graph.value_info[:]
    graph.node.extend(nodes)
    graph.initializer.extend([*kept, *added])


def has_vnni() -> bool:
    """Whether the processor adds INT8 products in 32 bits (AVX-512 VNNI, AVX VNNI or AMX)."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
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
