"""BERT-base in INT8 against ONNX Runtime in FP32, eager PyTorch, plain dynamic quantization and the machine itself.

    python -m benchmarks.engines prepare      # random weights of the right shapes, exported; a minute or two
    python -m benchmarks.engines              # measures; writes benchmarks/results/engines.json

Every engine has the same rows and threads, and they take turns: what disturbs one disturbs its neighbours. Times do not
depend on what the weights are. The ceiling is ONNX Runtime's own INT8 product on the model's own shapes, one after the
other, with nothing between them.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic

from bertship.artifacts import versions
from bertship.config import EncoderConfig, load_preset
from bertship.runners import OnnxRunner, available_threads
from bertship.tokenization import Row
from export.bench_engine import machine, paired_ratio, percentile, take_turns
from export.calibration import calibrate
from export.engines import product_session
from export.int8 import Recipe, find_products, weights_by_input
from export.int8_recipe import rewritten
from export.int8_ways import MIGRATIONS, scaling_of
from export.onnx_graph import export_onnx, quiet
from train.heads import HEADS, HeadedModel
from train.torch_runner import TorchRunner

FOLDER = Path("runs/bench-engine/base")
RESULTS = Path(__file__).parent / "results" / "engines.json"
VOCABULARY = 30522
FP32, CEILING = "onnxruntime fp32", "ceiling int8"
EAGER = "torch fp32, eager"
GRAPHS = {
    FP32: "model.onnx",
    "onnxruntime int8, static steps": "model.static.onnx",
    "onnxruntime int8, static steps, 16 outliers in fp32": "model.static16.onnx",
    "onnxruntime int8, a step a row": "model.rows.onnx",
    "onnxruntime int8, a step a row, 16 outliers in fp32": "model.rows16.onnx",
    "onnxruntime int8, without calibration": "model.plain.onnx",
    "onnxruntime quantize_dynamic, per channel": "model.dynamic.onnx",
}


def make_model() -> HeadedModel:
    torch.manual_seed(0)
    config = EncoderConfig(vocab_size=VOCABULARY, **load_preset("base")["model"])
    return HEADS["sentence"](config, 2).eval()


def make_rows(batch: int, tokens: int, seed: int = 0) -> list[Row]:
    rng = np.random.default_rng(seed)
    return [Row(rng.integers(1000, VOCABULARY, tokens), np.zeros(tokens, np.int64), i) for i in range(batch)]


def prepare(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / GRAPHS[FP32]
    if not source.is_file():
        export_onnx(make_model(), source)
    model = onnx.load(source)
    _, static, static16, rows, rows16, plain, dynamic = GRAPHS.values()
    for file, outliers, is_static in ((static, 0, True), (static16, 16, True), (rows, 0, False), (rows16, 16, False)):
        onnx.save(rewritten(model, _recipe(model, outliers, is_static), 127), folder / file)
    onnx.save(rewritten(model, Recipe(), 127), folder / plain)
    with quiet():
        quantize_dynamic(source, folder / dynamic, per_channel=True, weight_type=QuantType.QInt8)


def _recipe(model: Any, outliers: int, static: bool) -> Recipe:
    """Every input alike: how a way costs."""
    weights = weights_by_input(model.graph)
    activity = calibrate(model, list(weights), make_rows(4, 64))
    return Recipe({x: scaling_of(activity[x], weights[x], MIGRATIONS[0], outliers, static) for x in weights})


def measure(folder: Path, shapes: list[tuple[int, int]], seconds: float, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    runners: dict[str, Callable[[list[Row]], Any]] = {
        name: OnnxRunner(folder / file, threads) for name, file in GRAPHS.items() if (folder / file).is_file()
    }
    model = make_model()
    runners[EAGER] = TorchRunner(model, 0)
    weights = [dims for name, dims in _weights(folder / GRAPHS[FP32]) if name]
    result: dict[str, Any] = {
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(threads),
        "versions": versions(),
        "model": "BERT-base, random weights, sentence head",
        "rows": [],
    }
    for batch, tokens in shapes:
        rows = make_rows(batch, tokens)
        calls: dict[str, Callable[[], Any]] = {name: partial(run, rows) for name, run in runners.items()}
        products = [(batch * tokens, k, n) for k, n in weights]
        for kind in ("int8", "fp32"):
            calls[f"ceiling {kind}"] = product_session(kind, threads, products)
        times = dict(zip(calls, take_turns(list(calls.values()), seconds, 9), strict=True))
        result["rows"] += [_line(name, spent, times, batch, tokens) for name, spent in times.items()]
        print_cell(result["rows"][-len(times) :])
    return result


def _line(name: str, spent: list[float], times: dict[str, list[float]], batch: int, tokens: int) -> dict[str, Any]:
    return {
        "engine": name,
        "batch": batch,
        "tokens": tokens,
        "runs": len(spent),
        "median_ms": round(statistics.median(spent) * 1e3, 3),
        "fastest_ms": round(min(spent) * 1e3, 3),
        "p99_ms": round(percentile(spent, 99) * 1e3, 3),
        "to_onnxruntime_fp32": round(paired_ratio(spent, times[FP32]), 3),
        "to_torch_eager": round(paired_ratio(spent, times[EAGER]), 3),
        "of_int8_ceiling": round(paired_ratio(times[CEILING], spent), 3),
    }


def _weights(path: Path) -> list[tuple[str, tuple[int, int]]]:
    """The constants of the encoder's products, [units in, units out] each, in order."""
    graph = onnx.load(path).graph
    dims = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    return [(product.weight, dims[product.weight]) for product in find_products(graph)]


def print_cell(lines: list[dict[str, Any]]) -> None:
    print(f"\n{lines[0]['batch']} x {lines[0]['tokens']}")
    print(f"{'':<50}{'median ms':>10}{'fastest':>9}{'/ort fp32':>11}{'/eager':>9}{'of ceiling':>12}")
    for line in lines:
        print(
            f"{line['engine']:<50}{line['median_ms']:>10.2f}{line['fastest_ms']:>9.2f}"
            f"{line['to_onnxruntime_fp32']:>11.3f}{line['to_torch_eager']:>9.3f}{line['of_int8_ceiling']:>12.0%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", nargs="?", default="measure", choices=("prepare", "measure"))
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--shapes", default="1x128,1x16,1x384", help="batch x tokens, parted by commas")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each engine and shape")
    parser.add_argument("--threads", type=int, default=available_threads())
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.step == "prepare":
        prepare(options.folder)
        return
    if not (options.folder / GRAPHS[FP32]).is_file():
        sys.exit(f"no {options.folder / GRAPHS[FP32]}: run `python -m benchmarks.engines prepare` first")
    shapes = [(int(b), int(s)) for b, s in (shape.split("x") for shape in options.shapes.split(","))]
    result = measure(options.folder, shapes, options.seconds, options.threads)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
