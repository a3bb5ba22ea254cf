"""The gate with PyTorch at hand: the first layer that departs, FP16's range, and the model itself in half precision."""

import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx

from bertship.runners import OnnxRunner
from bertship.tokenization import Row, pad
from export.calibration import make_session
from export.layers import differences, first_departure, graph_hidden, layer_of, torch_hidden
from export.parity import Parity, assess, judge_engine, rows_of_all_lengths
from export.precision import PRECISIONS
from export.reference import Reference
from export.tolerances import TOLERANCES
from train.heads import HeadedModel
from train.torch_runner import TorchRunner

HALF = "torch half"


def judge(reference: Reference, precision: str, path: Path, model: HeadedModel) -> list[Parity]:
    """Every comparison of the graph at `path`, on ONNX Runtime's CPU provider, with `model`, its original in FP32.

    Raises CheckFailed as `judge_engine` does.
    """

    def departing_layer(feeds: dict[str, np.ndarray]) -> str:
        try:
            got = graph_hidden(path, model, feeds)
        except Exception as error:  # a spoilt graph may not run with its inner values as outputs
            return f"unknown ({str(error).splitlines()[0]:.80})"
        shares = differences(torch_hidden(model, feeds), got, feeds["attention_mask"])
        return first_departure(shares, TOLERANCES[precision].layer)

    max_tokens = model.config.max_position_embeddings
    found = judge_engine(reference, precision, "onnxruntime", lambda: OnnxRunner(path), max_tokens, departing_layer)
    if PRECISIONS[precision].narrow:
        found[0].failures += check_range(path, reference.rows, reference.tokenizer.pad_id, model)
    if PRECISIONS[precision].half:
        found.append(compare_half(reference, precision, model))
    return found


def compare_half(reference: Reference, precision: str, model: HeadedModel) -> Parity:
    """The model itself in half precision, each operation rounded: ONNX Runtime's CPU kernels compute FP16 in FP32."""
    half = copy.deepcopy(model).half()
    logits = TorchRunner(half, reference.tokenizer.pad_id)(reference.rows)
    departure = reference.departure(logits)
    result = assess(reference, precision, "torch", HALF, logits, departure)
    if result.failures:
        feeds = pad([reference.rows[departure.worst]], reference.tokenizer.pad_id)
        shares = differences(torch_hidden(model, feeds), torch_hidden(half, feeds), feeds["attention_mask"])
        result.failures[-1] += f"; the first to depart is {first_departure(shares, TOLERANCES[precision].layer)}"
    return result


def check_range(path: Path, rows: Sequence[Row], pad_id: int, model: HeadedModel) -> list[str]:
    """What leaves FP16's range between the nodes, on RANGE_ROWS rows of all lengths; an empty list when nothing does.

    ONNX Runtime's CPU kernels compute in FP32 and drop the casts between them, so an overflow that a GPU would meet
    shows only in tensors that it has to hand out. Accumulation inside a node is FP32 on GPUs too.
    """
    graph = onnx.shape_inference.infer_shapes(onnx.load(path))
    half = onnx.TensorProto.FLOAT16
    inner = [info for info in graph.graph.value_info if info.type.tensor_type.elem_type == half]
    graph.graph.output.extend(inner)
    session = make_session(graph)
    names = [info.name for info in inner]
    for row in rows_of_all_lengths(rows):
        for name, value in zip(names, session.run(names, pad([row], pad_id)), strict=True):
            if not np.isfinite(value).all():
                layer = layer_of(graph.graph, model, name)
                return [f"{name} leaves FP16's range on a row of {len(row)} tokens; the first to depart is {layer}"]
    return []
