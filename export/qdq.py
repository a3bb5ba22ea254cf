"""INT8 for TensorRT: QuantizeLinear and DequantizeLinear around the linear layers of an FP16 graph.

Scales are static, one for each activation tensor and one for each column of a weight, and symmetric, as TensorRT asks.
They come from real text. A BERT's activations have outliers in a few channels, which would take the others' precision;
so each channel is first divided by a factor that its weights take over (SmoothQuant, Xiao et al. 2023, equation 4). How
much of the difficulty the weights take is chosen for each layer by what the layer then gives for real tokens; a layer
that no choice brings near enough stays in FP16, as one with a token far beyond all others does. So do attention between
tokens, LayerNorm, embeddings and heads of few labels, and attention stays fused.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper, version_converter

from bertship.errors import CheckFailed, InputError
from bertship.tokenization import Row
from export.calibration import Activity, calibrate
from export.fp16 import to_fp16
from export.onnx_graph import check_graph, quiet

OPSET = 20  # the graph's: FP16 scales came with 19
NARROWEST_INT8 = 32  # columns: a head of few labels has little to gain and most to lose
LARGEST = 127
MIGRATIONS = (0.5, 0.65, 0.8, 0.95)  # alpha of SmoothQuant: the share of the difficulty that goes to the weights
LARGEST_ERROR = 0.02  # of a layer's output, as a share of it, for the token in the middle
SMALLEST_SCALE = float(np.finfo(np.float16).tiny)


def linear_layers(graph: Any) -> dict[str, list[Any]]:
    """MatMul nodes with a constant weight of NARROWEST_INT8 columns or more, by the activation that they read."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    found: dict[str, list[Any]] = {}
    for node in graph.node:
        weight = constants.get(node.input[1]) if node.op_type == "MatMul" else None
        if weight is not None and weight.dims[-1] >= NARROWEST_INT8:
            found.setdefault(node.input[0], []).append(node)
    return found


def to_int8_qdq(source: Path, target: Path, rows: Sequence[Row]) -> None:
    """The FP32 graph at `source` as an INT8 graph for TensorRT; `rows` are real text to take the ranges from.

    Raises InputError without rows, CheckFailed for weights that FP16 cannot hold, or where no layer bears INT8.
    """
    if not rows:
        raise InputError("INT8 for TensorRT takes its scales from real text; none was given")
    model = onnx.load(source)
    weights, scales = _smooth(model.graph, calibrate(model, list(linear_layers(model.graph)), rows))
    if not weights:
        raise CheckFailed(f"no layer of {source.name} bears INT8 with fixed scales; take fp16")
    onnx.save(model, target)
    to_fp16(target, target, rows)
    with quiet():
        narrow = version_converter.convert_version(onnx.load(target), OPSET)
    _quantize(narrow.graph, weights, scales)
    onnx.save(narrow, target)
    check_graph(target)


def smoothing_of(found: Activity, matrices: Sequence[np.ndarray]) -> tuple[np.ndarray, float]:
    """The best factor for each channel, float32 [K], and the error that the layers' outputs then have.

    The error is that of the token in the middle, as a share of its output: one token far beyond the others, whose own
    output INT8 keeps well, would hide what it costs them.
    """
    of_weights = np.max([np.abs(matrix).max(axis=1) for matrix in matrices], axis=0)
    # a channel that is all but silent would get a factor beyond any type
    activity = np.maximum(found.largest, found.largest.max() * 1e-3)
    strength = np.maximum(of_weights, of_weights.max() * 1e-3)
    best = (np.ones_like(activity), np.inf)
    for migration in MIGRATIONS:
        factor = (activity**migration / strength ** (1 - migration)).astype(np.float32)
        scale = float((found.largest / factor).max()) / LARGEST
        rounded = np.clip(np.rint(found.tokens / factor / scale), -LARGEST, LARGEST) * scale
        errors = []
        for matrix in matrices:
            wanted = found.tokens @ matrix
            integers, columns = integers_of(matrix * factor[:, None])
            got = rounded @ (integers * columns.astype(np.float32))
            lost = np.linalg.norm(got - wanted, axis=1) / np.maximum(np.linalg.norm(wanted, axis=1), 1e-9)
            errors.append(float(np.median(lost)))
        if max(errors) < best[1]:
            best = (factor, max(errors))
    return best


def integers_of(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A weight as int8 [K, N], and the scale of each column, float16 [N]."""
    columns = np.maximum(np.abs(matrix).max(axis=0) / LARGEST, SMALLEST_SCALE).astype(np.float16)
    integers = np.clip(np.rint(matrix / columns.astype(np.float32)), -LARGEST, LARGEST)
    return integers.astype(np.int8), columns


def _smooth(graph: Any, ranges: dict[str, Activity]) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Divide the input of each layer that bears INT8 by a factor a channel and multiply its weights, in place.

    Returns the new weights by name and each input's scale by its new name.
    """
    constants = {tensor.name: tensor for tensor in graph.initializer}
    weights: dict[str, np.ndarray] = {}
    scales: dict[str, float] = {}
    for x, nodes in linear_layers(graph).items():
        matrices = [numpy_helper.to_array(constants[node.input[1]]) for node in nodes]
        factor, error = smoothing_of(ranges[x], matrices)
        if error > LARGEST_ERROR:
            continue
        graph.initializer.append(numpy_helper.from_array(1 / factor, f"{x}_smoothing"))
        smooth = helper.make_node("Mul", [x, f"{x}_smoothing"], [f"{x}_smooth"], name=f"smooth_{x}")
        graph.node.insert(list(graph.node).index(nodes[0]), smooth)
        scales[f"{x}_smooth"] = float((ranges[x].largest / factor).max()) / LARGEST
        for node, matrix in zip(nodes, matrices, strict=True):
            node.input[0] = f"{x}_smooth"
            weights[node.input[1]] = matrix * factor[:, None]
            constants[node.input[1]].CopyFrom(numpy_helper.from_array(weights[node.input[1]], node.input[1]))
    return weights, scales


def _quantize(graph: Any, weights: dict[str, np.ndarray], scales: dict[str, float]) -> None:
    """Put the pairs of nodes around each smoothed layer of the FP16 graph, in place."""
    nodes: list[Any] = []
    added: list[Any] = [numpy_helper.from_array(np.array(0, np.int8), "int8_zero")]
    pairs: set[str] = set()

    def add(kind: str, inputs: list[str], output: str, **attributes: Any) -> None:
        nodes.append(helper.make_node(kind, inputs, [output], name=f"{kind}_{output}", **attributes))

    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in weights:
            x, name = node.input
            if x not in pairs:
                pairs.add(x)
                scale = np.float16(max(scales[x], SMALLEST_SCALE))
                added.append(numpy_helper.from_array(np.array(scale), f"{x}_scale"))
                add("QuantizeLinear", [x, f"{x}_scale", "int8_zero"], f"{x}_int8")
                add("DequantizeLinear", [f"{x}_int8", f"{x}_scale", "int8_zero"], f"{x}_rounded")
            integers, columns = integers_of(weights[name])
            zeros = np.zeros(len(columns), np.int8)
            for suffix, array in (("int8", integers), ("scale", columns), ("zero", zeros)):
                added.append(numpy_helper.from_array(array, f"{name}_{suffix}"))
            add("DequantizeLinear", [f"{name}_{s}" for s in ("int8", "scale", "zero")], f"{name}_rounded", axis=1)
            node.input[:] = [f"{x}_rounded", f"{name}_rounded"]
        nodes.append(node)
    kept = [tensor for tensor in graph.initializer if tensor.name not in weights]
    del graph.node[:], graph.initializer[:], graph.value_info[:]
    graph.node.extend(nodes)
    graph.initializer.extend([*kept, *added])
