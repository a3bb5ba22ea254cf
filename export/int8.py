"""INT8 for CPUs: ONNX Runtime's own integer product, every matrix of the encoder in one byte a weight.

A product y = x W + b of FP32 rows x with a constant W becomes

    y = step * (q - zero) W8 * columns + b        q = round(x * v / step) + zero, unsigned 8 bits

W8 = W / v in signed 8 bits, with one scale a column. What makes it exact enough:

balance   v moves what a unit of x is too large, or its weights are, to the other side (Xiao et al. 2023, SmoothQuant,
          section 4): one large unit would cost all others their precision.
outliers  the few units that are still too large may go through a narrow product in FP32 (Dettmers et al. 2022,
          LLM.int8(), section 3).
step      static: nothing is searched at run time, and b is added inside the product. Or each row's own, found as it
          comes.
rounding  to the nearest integer, or as real text has the least error (`export.int8_rounding`).

With either step the rows of a batch never change each other, which one step a tensor, found as it comes, would let
them (`quantize_dynamic`). Without real text there is only the step a row. What is left in FP32 is small: attention
between tokens, LayerNorm, GELU, the pooler and heads of few labels; and the layers that a recipe keeps. Embeddings have
one scale a piece, or are FP16. `export.int8_recipe` chooses among all this.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

FLOAT = onnx.TensorProto.FLOAT
DOMAIN = "com.microsoft"  # ONNX Runtime's own operators
NARROWEST = 32  # columns: a head of few labels has little to gain and most to lose
LEVELS = 255  # of an unsigned byte
FP16_LARGEST = float(np.finfo(np.float16).max)

# x, the weight's name, the balanced weight [K, N], its columns' scales [N], v [K] and the limit: integers, int8 [K, N]
Round = Callable[[str, str, np.ndarray, np.ndarray, np.ndarray, int], np.ndarray]


@dataclass(frozen=True)
class Product:
    """A MatMul with a constant, and the Add of a constant after it: by the names of their tensors."""

    layer: str  # for people: the bias' place in the model, or the weight's name
    x: str
    weight: str
    y: str
    bias: str  # empty where there is none
    output: str  # what is read on: y, or the sum


@dataclass(frozen=True, eq=False)
class Scaling:
    """How one x [.., K] becomes bytes, by what real text shows.

    `balance` [K]: v. `outliers`: the units that go in FP32. `low` and `high`: the span of the others' x * v,
    with 0 within.
    `static`: whether the step is that span's; else each row has its own.
    """

    balance: np.ndarray
    outliers: np.ndarray
    low: float
    high: float
    static: bool

    @property
    def others(self) -> np.ndarray:
        """v, 0 for the units that go in FP32."""
        v = self.balance.copy()
        v[self.outliers] = 0
        return v

    @property
    def one_sided(self) -> bool:
        """Whether a byte around 0 would leave a quarter or more of its values unused, as behind GELU."""
        return -self.low < self.high / 2

    @property
    def shifted(self) -> bool:
        """Whether a row's bytes begin at `low`."""
        return self.one_sided and not self.static


@dataclass(frozen=True, eq=False)
class Recipe:
    """`scalings` by the name of x, none for plain INT8; `kept`: layers that stay in FP32.

    `half_embeddings`: FP16 instead of INT8; `rounding` of weights, to the nearest where there is none.
    """

    scalings: Mapping[str, Scaling] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    half_embeddings: bool = False
    rounding: Round | None = None


def find_products(graph: Any) -> list[Product]:
    """Every MatMul of rows with a constant of at least NARROWEST columns, in order."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    readers: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    found = []
    for node in graph.node:
        if node.op_type != "MatMul" or node.input[1] not in constants:
            continue
        x, weight, y = node.input[0], node.input[1], node.output[0]
        if len(constants[weight].dims) != 2 or constants[weight].dims[1] < NARROWEST:
            continue
        bias, output = "", y
        after = readers.get(y, [])
        if len(after) == 1 and after[0].op_type == "Add":
            other = [name for name in after[0].input if name != y]
            if len(other) == 1 and other[0] in constants and len(constants[other[0]].dims) == 1:
                bias, output = other[0], after[0].output[0]
        layer = bias.removeprefix("encoder.").removesuffix(".bias") or weight
        found.append(Product(layer, x, weight, y, bias, output))
    return found


def weights_by_input(graph: Any) -> dict[str, np.ndarray]:
    """Of every x that products read, their weights side by side, float32 [K, N1 + N2 + ..]."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    read: dict[str, list[np.ndarray]] = {}
    for product in find_products(graph):
        read.setdefault(product.x, []).append(numpy_helper.to_array(constants[product.weight]))
    return {x: np.concatenate(weights, axis=1) for x, weights in read.items()}


def quantize(graph: Any, recipe: Recipe, limit: int) -> None:
    """Rewrite `graph` in place; the integers of weights are within +-`limit`."""
    _Rewriting(graph, recipe, limit).run()


class _Rewriting:
    def __init__(self, graph: Any, recipe: Recipe, limit: int) -> None:
        self.graph, self.recipe, self.limit = graph, recipe, limit
        self.constants = {tensor.name: tensor for tensor in graph.initializer}
        self.products = [product for product in find_products(graph) if product.layer not in recipe.kept]
        self.nodes: list[Any] = []
        self.added: dict[str, Any] = {}
        self.gathered: set[str] = set()
        self.bytes: dict[str, str] = {}  # of each x: query, key and value share theirs

    def run(self) -> None:
        starts = {product.y: product for product in self.products}
        ends = {product.output for product in self.products if product.bias}
        for node in self.graph.node:
            if node.output[0] in starts:
                self._product(starts[node.output[0]])
            elif node.output[0] not in ends:  # else the bias was added with its product
                self._lookup(node) if self._is_lookup(node) else self.nodes.append(node)
        used = {name for node in self.nodes for name in node.input}
        kept = [tensor for tensor in self.graph.initializer if tensor.name in used]
        del self.graph.node[:], self.graph.initializer[:], self.graph.value_info[:]
        self.graph.node.extend(self.nodes)
        self.graph.initializer.extend([*kept, *self.added.values()])

    def _product(self, product: Product) -> None:
        x, scaling = product.x, self.recipe.scalings.get(product.x)
        static = scaling is not None and scaling.static
        if x not in self.bytes:
            self.bytes[x] = self._static(x) if static else self._by_row(x)
        outliers = self._outliers(product)
        if scaling is not None and static:
            integers, columns = self._weight(product, (scaling.high - scaling.low) / LEVELS)
            inputs = [self.bytes[x], integers, self._number("one", 1), columns, self._zero(x), "", product.bias]
            y = f"{product.y}_others" if outliers else product.output
            self._add("MatMulIntegerToFloat", inputs, y, DOMAIN)
            if outliers:
                self._add("Add", [y, outliers], product.output)
            return
        integers, columns = self._weight(product, 1)
        inputs = [self.bytes[x], integers, self._row_step(x), columns, self._zero(x)]
        shares = self._add("MatMulIntegerToFloat", inputs, f"{product.y}_shares", DOMAIN)
        shifted = scaling is not None and scaling.shifted
        bias = self._shifted_bias(product, integers, columns) if shifted else product.bias
        terms = [name for name in (outliers, bias) if name]
        y = self._add("Mul", [shares, f"{x}_largest"], f"{product.y}_scaled" if terms else product.output)
        for i, term in enumerate(terms, 1):
            y = self._add("Add", [y, term], product.output if i == len(terms) else f"{product.y}_{i}")

    def _static(self, x: str) -> str:
        """The bytes of x by its constant step."""
        scaling = self.recipe.scalings[x]
        factor = scaling.others / ((scaling.high - scaling.low) / LEVELS)
        scaled = self._add("Mul", [x, self._constant(f"{x}_factor", factor.astype(np.float32))], f"{x}_scaled")
        return self._add("QuantizeLinear", [scaled, self._number("one", 1), self._zero(x)], f"{x}_uint8")

    def _by_row(self, x: str) -> str:
        """The bytes of x by the largest value of each row, which is `x`_largest."""
        scaling, balanced = self.recipe.scalings.get(x), x
        if scaling is not None:
            factor = self._constant(f"{x}_factor", scaling.others.astype(np.float32))
            balanced = self._add("Mul", [x, factor], f"{x}_balanced")
        if scaling is not None and scaling.shifted:
            low = self._constant(f"{x}_low", np.array(scaling.low, np.float32))
            balanced = magnitude = self._add("Sub", [balanced, low], f"{x}_shifted")
        else:
            magnitude = self._add("Abs", [balanced], f"{x}_abs")
        axis = self._constant("int8_axis", np.array([-1], np.int64))
        largest = self._add("ReduceMax", [magnitude, axis], f"{x}_largest", keepdims=1)
        # 0 / 0 for a row of zeros becomes some integer, and 0 again when multiplied by its largest value
        shares = self._add("Div", [balanced, largest], f"{x}_shares")
        return self._add("QuantizeLinear", [shares, self._row_step(x), self._zero(x)], f"{x}_uint8")

    def _row_step(self, x: str) -> str:
        """The step of a row whose largest value is 1."""
        scaling = self.recipe.scalings.get(x)
        shifted = scaling is not None and scaling.shifted
        return self._number("step", 1 / LEVELS) if shifted else self._number("half_step", 1 / 127)

    def _outliers(self, product: Product) -> str:
        """What the units in FP32 add to the product; empty where there are none."""
        scaling = self.recipe.scalings.get(product.x)
        if scaling is None or not len(scaling.outliers):
            return ""
        x = f"{product.x}_outliers"
        if x not in self.gathered:
            self.gathered.add(x)
            self._add("Gather", [product.x, self._constant(f"{x}_units", scaling.outliers)], x, axis=-1)
        weight = numpy_helper.to_array(self.constants[product.weight])[scaling.outliers]
        return self._add("MatMul", [x, self._constant(f"{product.weight}_outliers", weight)], f"{product.y}_outliers")

    def _weight(self, product: Product, step: float) -> tuple[str, str]:
        """The weight in INT8, 0 for the units in FP32, and the columns' scales times `step`."""
        weight = numpy_helper.to_array(self.constants[product.weight]).astype(np.float64)
        scaling, rounding = self.recipe.scalings.get(product.x), self.recipe.rounding
        if scaling is not None:
            weight = weight / scaling.balance[:, None]
            weight[scaling.outliers] = 0
        largest = np.abs(weight).max(axis=0)
        columns = np.where(largest > 0, largest / self.limit, 1)
        if scaling is not None and rounding is not None:
            integers = rounding(product.x, product.weight, weight, columns, scaling.balance, self.limit)
        else:
            integers = np.clip(np.rint(weight / columns), -self.limit, self.limit).astype(np.int8)
        return (
            self._constant(f"{product.weight}_int8", integers),
            self._constant(f"{product.weight}_scale", (columns * step).astype(np.float32)),
        )

    def _shifted_bias(self, product: Product, integers: str, columns: str) -> str:
        """The bias and what the bytes leave out: the lowest value times the sum of each column."""
        weight = numpy_helper.to_array(self.added[integers]).astype(np.float64)
        sums = (weight * numpy_helper.to_array(self.added[columns])).sum(axis=0)
        bias = numpy_helper.to_array(self.constants[product.bias]) if product.bias else 0
        low = self.recipe.scalings[product.x].low
        return self._constant(f"{product.y}_bias", (bias + low * sums).astype(np.float32))

    def _zero(self, x: str) -> str:
        """The byte that stands for 0 or, where bytes begin at the lowest value, for that."""
        scaling = self.recipe.scalings.get(x)
        if scaling is not None and scaling.static:
            zero = round(-scaling.low / (scaling.high - scaling.low) * LEVELS)
        else:
            zero = 0 if scaling is not None and scaling.shifted else 128
        return self._constant(f"int8_zero_{zero}", np.array(zero, np.uint8))

    def _is_lookup(self, node: Any) -> bool:
        return node.op_type == "Gather" and len(getattr(self.constants.get(node.input[0]), "dims", ())) == 2

    def _lookup(self, node: Any) -> None:
        """Embeddings, in a byte or two a value."""
        table, place, y = node.input[0], node.input[1], node.output[0]
        values = numpy_helper.to_array(self.constants[table])
        if self.recipe.half_embeddings and np.abs(values).max() < FP16_LARGEST:
            half = self._constant(f"{table}_half", values.astype(np.float16))
            self._add("Cast", [self._add("Gather", [half, place], f"{y}_half")], y, to=FLOAT)
            return
        largest = np.abs(values).max(axis=1, keepdims=True)
        scale = np.where(largest > 0, largest / 127, 1).astype(np.float32)
        integers = self._constant(f"{table}_int8", np.clip(np.rint(values / scale), -127, 127).astype(np.int8))
        scales = self._constant(f"{table}_scale", scale)
        row = self._add("Cast", [self._add("Gather", [integers, place], f"{y}_int8")], f"{y}_cast", to=FLOAT)
        self._add("Mul", [row, self._add("Gather", [scales, place], f"{y}_scale")], y)

    def _number(self, name: str, value: float) -> str:
        return self._constant(f"int8_{name}", np.array(value, np.float32))

    def _constant(self, name: str, value: np.ndarray) -> str:
        self.added.setdefault(name, numpy_helper.from_array(value, name))
        return name

    def _add(self, kind: str, inputs: Sequence[str], output: str, domain: str = "", **attributes: Any) -> str:
        name = f"{kind}_{output}"
        self.nodes.append(helper.make_node(kind, list(inputs), [output], name=name, domain=domain, **attributes))
        return output
