"""One canonical ONNX graph a model; every engine and precision is made from it."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import onnx
import torch

from bertship.errors import CheckFailed
from bertship.runners import OnnxRunner
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
            verbose=False,
        )
    graph = onnx.load(path)
    free_sequence(graph.graph, model)
    halve_last(graph.graph)
    onnx.save(graph, path)
    check_graph(path)


def free_sequence(graph: onnx.GraphProto, model: HeadedModel) -> None:
    """Where the graph has an LSTM, take back the traced length that the exporter states around it.

    The nodes run at any length; only the stated shapes are those of the example.
    """
    if model.PER_TOKEN and any(node.op_type == "LSTM" for node in graph.node):
        del graph.value_info[:]
        for value in (*graph.input, *graph.output):
            for place, name in enumerate(("batch", "sequence")):
                value.type.tensor_type.shape.dim[place].dim_param = name


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
