"""`make gpu-check`: what can be shown only on a GPU, in at most eight minutes.

On a machine with an NVIDIA GPU and TensorRT, best in NVIDIA's container: builds a plan, holds it against ONNX Runtime
in FP32 through `execute_async_v3`, serves it by Triton's own backend where `tritonserver` is, tries ONNX Runtime's CUDA
and TensorRT providers, and measures latencies with the copies to and from the GPU. It goes as far as the machine allows
and says what it could not show. Exit code 0: nothing that ran has failed; 1: something did.
"""

import argparse
import importlib
import json
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from bertship.artifacts import read_manifest, versions
from bertship.cuda import find_device
from bertship.errors import BertshipError, InputError
from bertship.onnx_gpu import PROVIDERS, OnnxGpuRunner
from bertship.pipeline import from_export
from bertship.runners import OnnxRunner
from bertship.tasks import Task, get_task
from bertship.tensorrt_runner import TensorRTRunner
from export.parity import check_shapes
from export.plan import make_plans
from export.tensorrt_engine import build_engine
from export.tolerances import TOLERANCES

LIMIT_S = 480
NEEDED_S = {"export": 120, "base": 120, "large": 200}  # a step is not begun with less than this left
GPU = "the GPU and its driver"
RTX_TARGETS = ("8.6", "8.9")
TINY = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
SIZES = {
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}
# NVIDIA TensorRT demoBERT, FP16, batch 1, A100, milliseconds, copies excluded; by size and tokens
DEMO_BERT_MS = {("base", 128): 0.67, ("base", 384): 1.31, ("large", 128): 1.64, ("large", 384): 3.12}
BATCHES = (1, 32)
LENGTHS = (128, 384)


class Skip(Exception):
    """Why a step cannot be run here."""


@dataclass
class Steps:
    """What was shown, what failed and what could not be tried, each with its reason."""

    deadline: float
    shown: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    figures: list[dict[str, Any]] = field(default_factory=list)

    def run(self, name: str, needed_s: float, body: Callable[[], str]) -> bool:
        """One step: `body` returns what it has shown. Its fault does not keep the others from running."""
        print(f"* {name}", flush=True)
        left_s = self.deadline - time.monotonic()
        try:
            if left_s < needed_s:
                raise Skip(f"it takes up to {needed_s:.0f} s, and {max(left_s, 0):.0f} s were left")
            found = body()
        except Skip as reason:
            self.skipped[name] = str(reason)
            print(f"    not tried: {reason}", flush=True)
            return False
        except Exception as error:
            said = str(error) or type(error).__name__
            self.failed[name] = " ".join(said.split() if isinstance(error, BertshipError) else repr(error).split())
            print(f"    FAILED: {self.failed[name]}", flush=True)
            return False
        self.shown[name] = found
        print(f"    {found}", flush=True)
        return True


@dataclass
class Machine:
    """What the first steps found."""

    device: Any = None
    trt: Any = None

    def need_tensorrt(self) -> None:
        if self.device is None:
            raise Skip("there is no GPU")
        if self.trt is None:
            raise Skip("there is no TensorRT")


def load(name: str) -> Any:
    return importlib.import_module(name)


def report(line: str) -> None:
    print(f"    {line}", flush=True)


def feeds_of(batch: int, tokens: int, vocab_size: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Random pieces, full rows: what the latency figures of others were measured with."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(min(1000, vocab_size // 2), vocab_size, (batch, tokens))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


def measure(run: Callable[..., Any], feeds: dict[str, np.ndarray], seconds: float) -> dict[str, Any]:
    """Milliseconds of a call, copies included: the median and the 99th percentile after a warm-up."""
    for _ in range(5):
        run(feeds)
    times: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until or len(times) < 10:
        started = time.perf_counter()
        run(feeds)
        times.append((time.perf_counter() - started) * 1e3)
    p50, p99 = np.percentile(times, [50, 99])
    return {"p50_ms": round(float(p50), 3), "p99_ms": round(float(p99), 3), "calls": len(times)}


def latencies(
    steps: Steps, engine: str, size: str, run: Callable[..., Any], vocab_size: int, seconds: float = 1.0
) -> str:
    """Every batch and length, kept in the figures; the summary in one line."""
    said = []
    for batch in BATCHES:
        for tokens in LENGTHS:
            row = {"engine": engine, "size": size, "batch": batch, "tokens": tokens}
            row |= measure(run, feeds_of(batch, tokens, vocab_size), seconds)
            theirs = DEMO_BERT_MS.get((size, tokens)) if batch == 1 else None
            if theirs is not None:
                row["demobert_a100_ms"] = theirs
            steps.figures.append(row)
            beside = f" (demoBERT on an A100, without copies: {theirs})" if theirs is not None else ""
            said.append(f"{batch} x {tokens}: p50 {row['p50_ms']} ms, p99 {row['p99_ms']} ms{beside}")
    return "; ".join(said)


def random_graphs(size: str, task: Task, folder: Path) -> tuple[Path, Path, int]:
    """The FP32 and FP16 graphs of a model of that size with random weights, and its vocabulary's size."""
    try:
        import torch
    except ImportError:
        raise Skip("PyTorch is not installed, which makes the graph") from None
    from bertship.config import EncoderConfig
    from export.fp16 import to_fp16
    from export.onnx_graph import export_onnx
    from train.heads import HEADS

    torch.manual_seed(0)
    config = EncoderConfig(vocab_size=30522, **{"tiny": TINY, **SIZES}[size])
    model = HEADS[task.behaviour.head](config, task.behaviour.width(task)).eval()
    source, half = folder / f"{size}.onnx", folder / f"{size}.fp16.onnx"
    export_onnx(model, source)
    to_fp16(source, half)
    return source, half, config.vocab_size


def largest_difference(wanted: list[np.ndarray], got: list[np.ndarray]) -> float:
    """As a share of the largest magnitude; infinite where a value is not finite."""
    if not all(np.isfinite(values).all() for values in got):
        return float("inf")
    return float(max(np.abs(a - b).max() / np.abs(a).max() for a, b in zip(wanted, got, strict=True)))


def hold_against(name: str, wanted: list[np.ndarray], got: list[np.ndarray]) -> str:
    """Raises InputError where two engines depart by more than FP16 may."""
    share, limit = largest_difference(wanted, got), TOLERANCES["fp16"].max_difference
    if not share <= limit:
        raise InputError(f"{name} departs by {share:.2g} of the largest logit, {limit:g} allowed")
    return f"largest difference from FP32 on the CPU {share:.1e} of the largest logit, {limit:g} allowed"


def find_export(given: Path | None) -> Path | None:
    """The export to take: the given one, or none where it was never made."""
    return given if given is not None and (given / "manifest.json").is_file() else None


def check(export: Path | None, limit_s: float = LIMIT_S) -> Steps:
    """Every step in turn. Nothing under `export` is changed: a copy is worked on."""
    steps, machine = Steps(time.monotonic() + limit_s), Machine()

    def find_gpu() -> str:
        try:
            machine.device = device = find_device()
        except InputError as error:
            raise Skip(str(error)) from None
        return f"{device.name}, compute capability {device.compute_capability}, driver for CUDA {device.driver_cuda}"

    def find_tensorrt() -> str:
        try:
            machine.trt = load("tensorrt")
        except ImportError:
            raise Skip("the Python package tensorrt is not installed") from None
        return f"TensorRT {machine.trt.__version__}"

    steps.run(GPU, 5, find_gpu)
    steps.run("TensorRT", 5, find_tensorrt)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        steps.run("TensorRT for RTX builds the graph, which takes no GPU", 60, lambda: build_rtx(folder))
        check_export(steps, machine, export, folder)
        for size in SIZES:
            steps.run(
                f"BERT-{size} with random weights: plan, differences, latencies with copies",
                NEEDED_S[size],
                lambda size=size: check_size(steps, machine, size, folder),
            )
    return steps


def build_rtx(folder: Path) -> str:
    try:
        rtx = load("tensorrt_rtx")
    except ImportError:
        raise Skip("the package tensorrt-rtx-cu12 is not installed") from None
    task = get_task("squad")
    _, half, _ = random_graphs("tiny", task, folder)
    facts = build_engine(half, folder / "rtx.plan", task, rtx, compute_capabilities=RTX_TARGETS)
    return (
        f"for compute capabilities {' and '.join(RTX_TARGETS)}: fused attentions by profile "
        f"{facts['fused_attentions']} in {TINY['num_hidden_layers']} layers; built, not run"
    )


def check_export(steps: Steps, machine: Machine, export: Path | None, folder: Path) -> None:
    """A trained model's plan: built, judged on real text, served."""
    copy = folder / "export"

    def build_and_judge() -> str:
        machine.need_tensorrt()
        if export is None:
            raise Skip("there is no export; make one (`make export TASK=squad`), and `make gpu-check TASK=squad`")
        shutil.copytree(export, copy)
        manifest = make_plans(copy, report, trt=machine.trt)
        plan = manifest["plans"]["fp16"]
        parity = [result for result in manifest["plan_parity"] if result["precision"] == "fp16"]
        agreement, largest = (min(r["agreement"] for r in parity), max(r["max_difference"] for r in parity))
        return (
            f"{plan['bytes'] / 1e6:.1f} MB in {plan['build_seconds']} s, fused attentions by profile "
            f"{plan['fused_attentions']}; on {parity[0]['rows']} rows at every bucket at least {agreement:.2%} of the "
            f"decisions agree, largest difference {largest:.1e}"
        )

    def on_provider(provider: str) -> str:
        if machine.device is None:
            raise Skip("there is no GPU")
        if export is None:
            raise Skip("there is no export to run")
        return check_provider(export, provider)

    def by_triton() -> str:
        if not built:
            raise Skip("there is no plan to serve")
        if shutil.which("tritonserver") is None:
            raise Skip("tritonserver is not on the PATH; NVIDIA's Triton container has it")
        return serve(copy, folder)

    name = "a trained export's plan, built, and judged on its texts by execute_async_v3"
    built = steps.run(name, NEEDED_S["export"], build_and_judge)
    for provider, title in PROVIDERS.items():
        steps.run(f"ONNX Runtime's {title}", 60, lambda provider=provider: on_provider(provider))
    steps.run("Triton's TensorRT backend serves the plan", 60, by_triton)


def check_provider(export: Path, provider: str) -> str:
    """The export's FP16 graph on a GPU provider against FP32 on the CPU, at every bucket."""
    offered = onnxruntime.get_available_providers()
    if PROVIDERS[provider] not in offered:
        raise Skip(f"this ONNX Runtime has {', '.join(offered)}; install onnxruntime-gpu in place of onnxruntime")
    graphs = read_manifest(export, "export")["graphs"]
    if "fp16" not in graphs:
        raise Skip(f"{export} has no FP16 graph")
    pipeline = from_export(export, "fp16")
    task = pipeline.task
    pipeline.runner.close()
    runner = OnnxGpuRunner(export / graphs["fp16"], provider, task.buckets)
    reference = OnnxRunner(export / "model.onnx")
    said = ""
    for tokens in task.buckets:
        feeds = feeds_of(4, tokens, pipeline.tokenizer.vocab_size)
        said = hold_against(provider, reference.run(feeds), runner.run(feeds))
    return said


def serve(export: Path, folder: Path) -> str:
    """Start tritonserver on the plan alone and ask its encoder; its answers against the plan's own."""
    import tritonclient.http as http

    from serving.repository import render_files

    manifest = read_manifest(export, "export")
    task = Task.from_file(export / "task.json")
    facts = manifest["plans"]["fp16"]
    model = f"{task.name}_encode"
    repository = folder / "repository"
    (repository / model / "1").mkdir(parents=True)
    (repository / model / "config.pbtxt").write_text(render_files(task)[f"{model}/config.pbtxt"], encoding="utf-8")
    shutil.copyfile(export / facts["file"], repository / model / "1" / "model.plan")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        "tritonserver",
        f"--model-repository={repository}",
        f"--http-port={port}",
        "--allow-grpc=0",
        "--allow-metrics=0",
        "--model-control-mode=explicit",
        f"--load-model={model}",
    ]
    with (folder / "triton.log").open("w", encoding="utf-8") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)  # it has the file of its own
    try:
        client = http.InferenceServerClient(f"127.0.0.1:{port}")
        until = time.monotonic() + 45
        while not _ready(client, model):
            if server.poll() is not None or time.monotonic() > until:
                tail = (folder / "triton.log").read_text(encoding="utf-8", errors="replace").splitlines()[-3:]
                raise InputError(f"tritonserver did not serve {model}: {' | '.join(tail)}")
            time.sleep(0.5)
        runner = TensorRTRunner(export / facts["file"], facts)
        worst = 0.0
        for tokens in task.buckets:
            feeds = feeds_of(3, tokens, 1000)
            inputs = []
            for name, values in feeds.items():
                inputs.append(http.InferInput(name, values.shape, "INT64"))
                inputs[-1].set_data_from_numpy(values)
            answer = client.infer(model, inputs)
            got = [answer.as_numpy(name) for name in runner.outputs]
            worst = max(worst, largest_difference(runner.run(feeds), got))
        runner.close()
        if worst > TOLERANCES["fp32"].max_difference:
            raise InputError(f"Triton's answers depart from the plan's own by {worst:.2g}")
        return f"{model} ready, answers within {worst:.1e} of the plan's own at every bucket"
    finally:
        server.terminate()
        server.wait(30)


def _ready(client: Any, model: str) -> bool:
    try:
        return bool(client.is_model_ready(model))
    except Exception:  # until it listens, each library below has its own error
        return False


def check_size(steps: Steps, machine: Machine, size: str, folder: Path) -> str:
    machine.need_tensorrt()
    task = get_task("squad")
    source, half, vocab_size = random_graphs(size, task, folder)
    plan = folder / f"{size}.plan"
    facts = build_engine(half, plan, task, machine.trt, report=report)
    runner = TensorRTRunner(plan, facts, trt=machine.trt)
    if wrong := check_shapes(runner, task.max_tokens):
        raise InputError("; ".join(wrong))
    feeds = feeds_of(2, LENGTHS[0], vocab_size)
    near = hold_against(size, OnnxRunner(source).run(feeds), runner.run(feeds))
    times = latencies(steps, "tensorrt", size, runner.run, vocab_size)
    runner.close()
    return f"fused attentions by profile {facts['fused_attentions']}; {near}; {times}"


def conclude(steps: Steps, device: bool) -> list[str]:
    """What was shown and what was not, in plain words."""
    lines = [f"shown:      {name}: {found}" for name, found in steps.shown.items()]
    lines += [f"FAILED:     {name}: {reason}" for name, reason in steps.failed.items()]
    lines += [f"not shown:  {name}: {reason}" for name, reason in steps.skipped.items()]
    if not device:
        lines.append("nothing was proven on a GPU: this machine has none that can be used")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--export", type=Path, help="an export of `bertship export` to build the plan of")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-check.json"), help="where the figures are kept")
    arguments = parser.parse_args()
    started = time.monotonic()
    steps = check(find_export(arguments.export))
    gpu = GPU in steps.shown
    print()
    for line in conclude(steps, gpu):
        print(line)
    result = {
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(time.monotonic() - started, 1),
        "machine": {"processor": platform.processor() or platform.machine(), "system": platform.platform()},
        "versions": versions(),
        "shown": steps.shown,
        "failed": steps.failed,
        "not_shown": steps.skipped,
        "proven_on_a_gpu": gpu and not steps.failed,
        "latencies": steps.figures,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"kept in {arguments.out}")
    return 1 if steps.failed else 0


if __name__ == "__main__":
    sys.exit(main())
