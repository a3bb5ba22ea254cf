"""FP16: weights and arithmetic in half precision, but LayerNorms whose squares come near the end of its range in FP32.

LayerNorm squares each value's distance from the mean. ONNX asks for FP32 there (`stash_type`), but an engine that
squares in FP16 meets infinity at 256, and outliers come close: 221 in the first block of a fine-tuned 6-layer encoder.
Written as an island, with casts around it, the graph leaves no engine a choice. Softmax stays in FP16: an island there
would break the fusion of attention.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper
from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST, convert_float_to_float16
from onnxruntime.transformers.onnx_model import OnnxModel

from bertship.errors import CheckFailed
from bertship.runners import available_threads
from bertship.tokenization import Row, pad
from export.onnx_graph import check_graph, quiet

FLOAT = onnx.TensorProto.FLOAT
FP16_LARGEST = float(np.finfo(np.float16).max)
NORM = "LayerNormalization"
FP32_ONLY = ("LSTM",)  # ONNX Runtime has no FP16 kernel of it on a CPU
HEADROOM = 2  # texts that were not looked at may reach further
LARGEST_DEVIATION = float(np.sqrt(FP16_LARGEST)) / HEADROOM


def to_fp16(source: Path, target: Path, rows: Sequence[Row] = ()) -> None:
    """Weights and arithmetic in FP16; inputs and outputs keep their types, and so do LayerNorms that need it.

    `rows` are real text, which shows where they do (`fp32_norms`). Raises CheckFailed for larger weights.
    """
    model = onnx.load(source)
    for tensor in model.graph.initializer:
        if tensor.data_type == FLOAT and (largest := float(np.abs(numpy_helper.to_array(tensor)).max())) > FP16_LARGEST:
            raise CheckFailed(
                f"weight {tensor.name} reaches {largest:.3g}, FP16 ends at {FP16_LARGEST:g}; leave fp16 out"
            )
    with quiet():
        graph = convert_float_to_float16(
            model,
            keep_io_types=True,
            max_finite_val=FP16_LARGEST,
            op_block_list=[*DEFAULT_OP_BLOCK_LIST, *FP32_ONLY],
            node_block_list=fp32_norms(source, rows),
        )
    # the converter puts the casts of islands last, and leaves the types from before beside them
    OnnxModel.graph_topological_sort(graph.graph)
    del graph.graph.value_info[:]
    onnx.save(graph, target)
    check_graph(target)


def deviations(source: Path, rows: Sequence[Row]) -> dict[str, float]:
    """Each LayerNorm node's largest distance of an input value from its token's mean, over `rows`, by node name."""
    model = onnx.load(source)
    inputs = {node.name: node.input[0] for node in model.graph.node if node.op_type == NORM}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inputs.values())
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = available_threads()
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    largest = dict.fromkeys(inputs, 0.0)
    for row in rows:
        values = session.run(list(inputs.values()), pad([row], 0))
        for name, x in zip(inputs, values, strict=True):
            largest[name] = max(largest[name], float(np.abs(x - x.mean(axis=-1, keepdims=True)).max()))
    return largest


def fp32_norms(source: Path, rows: Sequence[Row]) -> list[str]:
    """Names of the LayerNorm nodes of the FP32 graph that FP16 is too narrow for, on `rows` of real text."""
    if not rows:
        return []
    return [name for name, largest in deviations(source, rows).items() if not largest <= LARGEST_DEVIATION]
