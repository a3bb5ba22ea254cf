"""One canonical ONNX graph a model; every engine and precision is made from it."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import torch
from onnxscript import opset18

from bertship.errors import CheckFailed
from bertship.runners import OnnxRunner
from train import features as features  # registers the operator of `onnx_lstm`
from train.heads import HeadedModel

OPSET = 18  # the newest that ONNX Runtime, TensorRT 10 and 11 and their quantizers all read


def export_onnx(model: HeadedModel, path: Path) -> None:
    """Write `model` in FP32 with inputs by name (int64 [batch, sequence], both free) and its OUTPUTS.

    The graph is checked, with shapes inferred, before this returns.
    """
    model.eval()
    # traced at sizes that are neither 0 nor 1 nor equal: the exporter would take those for constants or for each other
    example = {name: torch.ones(3, 7, dtype=torch.int64) for name in OnnxRunner.INPUTS}
    longest = model.config.max_position_embeddings
    dynamic = {0: torch.export.Dim("batch", min=1), 1: torch.export.Dim("sequence", min=1, max=longest)}
    with quiet():
        torch.onnx.export(
            model,
            kwargs=example,
            f=str(path),
            dynamo=True,
            opset_version=OPSET,
            input_names=list(OnnxRunner.INPUTS),
            output_names=list(model.OUTPUTS),
            dynamic_shapes=dict.fromkeys(OnnxRunner.INPUTS, dynamic),
            external_data=False,
            custom_translation_table={torch.ops.bertship.lstm.default: onnx_lstm},
            verbose=False,
        )
    graph = onnx.load(path)
    halve_last(graph.graph)
    transpose_once(graph.graph)
    onnx.save(graph, path)
    check_graph(path)


def onnx_lstm(x: Any, w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any) -> Any:
    """`train.features.exported_lstm` in ONNX, which has its own order of gates (ONNX, operator LSTM)."""

    op: Any = opset18

    def gates(values: Any) -> Any:
        into, forget, cell, out = op.Split(values, axis=0, num_outputs=4)
        return op.Concat(into, out, forget, cell, axis=0)

    first = op.Constant(value_ints=[0])
    biases = op.Concat(gates(b_ih), gates(b_hh), axis=0)
    y_S1BU, _, _ = op.LSTM(
        op.Transpose(x, perm=[1, 0, 2]),
        op.Unsqueeze(gates(w_ih), first),
        op.Unsqueeze(gates(w_hh), first),
        op.Unsqueeze(biases, first),
        hidden_size=w_hh.shape[1],
    )
    return op.Transpose(op.Squeeze(y_S1BU, op.Constant(value_ints=[1])), perm=[1, 0, 2])


def check_graph(path: Path) -> None:
    """Hold a graph against ONNX's own rules, types and shapes included. Raises CheckFailed in one line."""
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise CheckFailed(f"{path.name} is not a valid ONNX graph: {' '.join(str(error).split())}") from None


def halve_last(graph: onnx.GraphProto) -> None:
    """Turn each GELU's x * (0.5 * y) into (x * y) * 0.5, the order that ONNX Runtime fuses; the same bits."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    makers = {output: node for node in graph.node for output in node.output}
    for node in graph.node:
        for x, product in (tuple(node.input), tuple(node.input)[::-1]) if node.op_type == "Mul" else ():
            inner = makers.get(product)
            if inner is None or inner.op_type != "Mul" or inner.input[0] not in constants:
                continue
            half, y = inner.input
            value = onnx.numpy_helper.to_array(constants[half])
            grown = makers.get(y)  # 1 + erf(x / sqrt(2))
            erf = [makers[name].op_type for name in grown.input if name in makers] if grown is not None else []
            if value.size == 1 and value.item() == 0.5 and "Erf" in erf:
                inner.input[:] = [x, y]
                node.input[:] = [product, half]
                break


def transpose_once(graph: onnx.GraphProto) -> None:
    """Turn the keys in one step, [B, S, H, D] to [B, H, D, S]; the same bits.

    The exporter turns them twice, the second time through three dimensions and back, with their sizes found out anew in
    each layer.
    """
    makers = {output: node for node in graph.node for output in node.output}

    def before(node: onnx.NodeProto | None, kind: str) -> onnx.NodeProto | None:
        maker = makers.get(node.input[0]) if node is not None else None
        return maker if maker is not None and maker.op_type == kind else None

    for node in graph.node:
        inner = before(node, "Transpose") if node.op_type == "Reshape" else None
        outer = before(before(inner, "Reshape"), "Transpose")
        if inner is not None and outer is not None and (_order(inner), _order(outer)) == ([0, 2, 1], [0, 2, 1, 3]):
            turned = onnx.helper.make_node("Transpose", outer.input, node.output, name=node.name, perm=[0, 2, 3, 1])
            node.CopyFrom(turned)
    _drop_unread(graph)


def _order(transpose: onnx.NodeProto) -> list[int]:
    return next(list(attribute.ints) for attribute in transpose.attribute if attribute.name == "perm")


def _drop_unread(graph: onnx.GraphProto) -> None:
    """Take out every node that nothing reads any more, and what is stated of its outputs."""
    nodes: list[onnx.NodeProto] = []
    read = {output.name for output in graph.output}
    for node in reversed(graph.node):  # in the order of the data, so that a reader comes before what it reads
        if read & set(node.output):
            read.update(node.input)
            nodes.append(node)
    kept = [value for value in graph.value_info if value.name in read]
    del graph.node[:], graph.value_info[:]
    graph.node.extend(reversed(nodes))
    graph.value_info.extend(kept)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the exporter's and the quantizer's chatter off the terminal; their errors are exceptions."""
    levels = {name: logging.getLogger(name).level for name in ("", "torch.onnx", "onnxscript", "onnx_ir")}
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for name in levels:
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
