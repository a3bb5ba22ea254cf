"""The engines that a machine has for an export, behind one call, and what the machine itself can do in a precision.

An engine's ceiling is a large matrix product in its precision, by its own library and with its threads: the speed that
a model of nothing but such products would have.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper

from bertship.errors import InputError
from bertship.runners import OnnxRunner, session_options
from bertship.tasks import Task
from bertship.tasks.base import Logits
from bertship.tokenization import Row, Tokenizer
from export.precision import PRECISIONS
from export.source import model_of
from train.optim import pick_precision
from train.torch_runner import TorchRunner

CEILING_SIZE = 2048  # rows and columns of the product
CEILING_S = 0.5  # the fastest of the products in this time
PRODUCTS = ("MatMul", "MatMulIntegerToFloat", "MatMulInteger")


@dataclass(frozen=True)
class Engine:
    """`run` takes rows to logits; `ceiling` measures the library's products, in operations a second."""

    runner: str
    precision: str
    run: Callable[[Sequence[Row]], Logits]
    padded: Callable[[dict[str, np.ndarray]], list[np.ndarray]]
    ceiling: Callable[[], float]
    close: Callable[[], None] = lambda: None

    @property
    def name(self) -> str:
        return f"{self.runner} {self.precision}"


@dataclass(frozen=True)
class Work:
    """Operations of the encoder's matrix products, a multiplication and an addition being two.

    `token`: for each token, in products with weights; `pair`: for each token and each that it attends to.
    """

    token: int
    pair: int

    def of(self, tokens: int, rows: int = 1) -> int:
        return rows * (tokens * self.token + tokens * tokens * self.pair)


def work_of(graph: Any) -> Work:
    """What a graph of ours computes. What sees one token is left out: the pooler, the heads of one row, and in front of
    them most of the last layer."""
    constants = {tensor.name: tensor.dims for tensor in graph.initializer}
    makers = {output: node for node in graph.node for output in node.output}

    def weight(name: str) -> Sequence[int] | None:
        while name not in constants and name in makers and makers[name].op_type == "DequantizeLinear":
            name = makers[name].input[0]
        return constants.get(name)

    first: set[str] = set()  # what descends from the first token's vector alone
    for node in graph.node:
        if node.op_type == "Slice" or not first.isdisjoint(node.input):
            first.update(node.output)
    of_all = [node for node in graph.node if node.op_type in PRODUCTS and node.input[0] not in first]
    shapes = [weight(node.input[1]) for node in of_all]
    weights = [shape for shape in shapes if shape is not None and len(shape) == 2]
    if not weights:
        raise InputError("the graph has no matrix products with weights; it is no graph of `bertship export`")
    attentions = [node for node in graph.node if node.op_type in ("Softmax", "MultiHeadAttention")]
    asking_once = sum(not first.isdisjoint(node.input) for node in attentions)
    attention = 4 * weights[0][0]
    return Work(
        token=sum(2 * k * n for k, n in weights) + asking_once * attention,
        pair=(len(attentions) - asking_once) * attention,
    )


def find_engines(
    export: Path, manifest: Mapping[str, Any], threads: int, report: Callable[[str], None], only: Iterable[str] = ()
) -> list[Engine]:
    """Every engine that can run the export here; what is left out is reported with its reason.

    `only` names precisions; empty takes all but what would be emulated: FP16 on ONNX Runtime's CPU provider, which
    computes it in FP32, and BF16 on a processor without instructions for it.
    """
    torch.set_num_threads(threads)
    wanted = set(only)
    found = []
    for name, file in manifest["graphs"].items():
        if wanted and name not in wanted:
            continue
        if not wanted and PRECISIONS[name].narrow:
            report(f"onnxruntime {name} is left out: the CPU provider computes it in FP32; --precision {name} adds it")
            continue
        runner = OnnxRunner(export / file, threads)
        ceiling = partial(onnx_ceiling, "int8" if name == "int8" else "fp32", threads)
        found.append(Engine("onnxruntime", name, runner, runner.run, ceiling, runner.close))
    task = Task.from_file(export / "task.json")
    pad_id = Tokenizer.from_file(export / "tokenizer.json").pad_id
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        if wanted and name not in wanted:
            continue
        if not wanted and name == "bf16" and pick_precision("auto", "cpu") is None:
            report("torch bf16 is left out: this processor emulates it, slower than FP32; --precision bf16 adds it")
            continue
        try:
            model = model_of(export, manifest, task)
        except InputError as error:
            report(f"torch is left out: {error}")
            break
        torch_runner = TorchRunner(model.to(dtype), pad_id)
        found.append(Engine("torch", name, torch_runner, torch_runner.run, partial(torch_ceiling, dtype)))
    if not found:
        raise InputError(
            f"nothing here runs {', '.join(sorted(wanted)) or 'this export'}; see what was left out, above"
        )
    return found


def torch_ceiling(dtype: torch.dtype) -> float:
    """Operations a second of PyTorch's product of two square matrices, with the threads that it has."""
    left, right = (torch.randn(CEILING_SIZE, CEILING_SIZE).to(dtype) for _ in range(2))
    with torch.inference_mode():
        return 2 * CEILING_SIZE**3 / _fastest(lambda: left @ right)


def onnx_ceiling(kind: str, threads: int) -> float:
    """Operations a second of ONNX Runtime's product of two square matrices, `kind` being fp32 or int8 (unsigned by
    signed, scaled to FP32), the second constant as in a model."""
    return 2 * CEILING_SIZE**3 / _fastest(product_session(kind, threads, [(CEILING_SIZE,) * 3]))


def product_session(kind: str, threads: int, shapes: Sequence[tuple[int, int, int]]) -> Callable[[], Any]:
    """A call that runs the products of `shapes` on ONNX Runtime, each on rows of its own size, with its own weight.

    `shapes` are (rows, units in, units out); `kind` is fp32 or int8.
    """
    rng = np.random.default_rng(0)
    int8 = kind == "int8"
    nodes, constants, outputs = [], [], []
    feeds: dict[str, np.ndarray] = {}
    if int8:
        constants = [
            numpy_helper.from_array(np.array(0.02, np.float32), "x_scale"),
            numpy_helper.from_array(np.array(128, np.uint8), "x_zero"),
        ]
    for i, (m, k, n) in enumerate(shapes):
        x = f"x_{m}_{k}"
        if x not in feeds:
            values = rng.integers(0, 256, (m, k)).astype(np.uint8)
            feeds[x] = values if int8 else rng.standard_normal((m, k), np.float32)
        weight = rng.integers(-127, 128, (k, n)).astype(np.int8) if int8 else rng.standard_normal((k, n), np.float32)
        constants.append(numpy_helper.from_array(weight, f"w{i}"))
        if int8:
            constants.append(numpy_helper.from_array(np.full(n, 1e-3, np.float32), f"s{i}"))
            inputs = [x, f"w{i}", "x_scale", f"s{i}", "x_zero"]
            nodes.append(helper.make_node("MatMulIntegerToFloat", inputs, [f"y{i}"], domain="com.microsoft"))
        else:
            nodes.append(helper.make_node("MatMul", [x, f"w{i}"], [f"y{i}"]))
        outputs.append(helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, [m, n]))
    element = TensorProto.UINT8 if int8 else TensorProto.FLOAT
    graph_inputs = [helper.make_tensor_value_info(name, element, list(x.shape)) for name, x in feeds.items()]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "products", graph_inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = session_options(threads)
    # protobuf ends at 2 GiB, far above the weights of the largest BERT in one layer after the other
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, feeds)


def max_positions(graph: onnx.GraphProto) -> int:
    """The longest row, in tokens, that the graph's position table covers."""
    for tensor in graph.initializer:
        if (
            tensor.name.startswith("encoder.embeddings.position.weight")
            and len(tensor.dims) == 2
            and tensor.dims[1] > 1
        ):
            return int(tensor.dims[0])
    raise InputError("the graph has no position table; it is no graph of `bertship export`")


def _fastest(call: Callable[[], Any]) -> float:
    """Seconds of the fastest call: what the machine can do when nothing disturbs it."""
    call()
    best, end = float("inf"), time.perf_counter() + CEILING_S
    while time.perf_counter() < end or best == float("inf"):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best
