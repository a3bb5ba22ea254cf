"""What pre-training does on a CUDA machine, in at most eight minutes: parity with the CPU, speed, MFU, memory.

    python -m benchmarks.gpu [--minutes 8]

1. Parity: one model and batch on the CPU and on the GPU in FP32 and bf16, rows padded and unpadded, in both
   directions, compiled and not: losses and gradients.
2. The matrix product's rate in bf16: what MFU is a share of.
3. BERT-base and -large at 128 and 512 tokens, in bf16: sequences a second of whole updates (forward, backward, clip,
   AdamW), MFU and peak memory. The bar is half of the matrix product's rate.

What the machine cannot show is said and left out; without CUDA, a tiny model on the CPU shows that the script runs.
Each result is saved to benchmarks/results/gpu.json as soon as it is there. Exit code 1: parity did not hold.
"""

import argparse
import itertools
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.machine import describe_machine, save_result
from bertship.config import EncoderConfig, PretrainConfig, load_preset
from bertship.tokenization import Row
from train.batches import Batch, Counts, Phase
from train.dataset import Sample, Span
from train.distributed import Processes
from train.flops import matrix_product_rate, training_flops
from train.heads import PretrainingModel
from train.learner import Learner
from train.objectives import forward, loss_sums
from train.packing import lay_out

# (preset, tokens, sequences an update, sequences at once); at once is halved where memory is short
RUNS = (("large", 128, 256, 256), ("large", 512, 64, 64), ("base", 128, 512, 512), ("base", 512, 128, 128))
BARS = {("large", 128): 1650, ("large", 512): 390}  # sequences/s on one H200, half of its matrix product's rate
NEEDED_S = 60  # a run is not begun with less left: compilation takes most of it
SETTLE, MEASURE_S = 6, {"cuda": 15.0, "cpu": 2.0}
PARITY = EncoderConfig(
    vocab_size=512,
    hidden_size=128,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=256,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    initializer_range=0.1,
)


@dataclass
class Found:
    """What was measured, what failed and what could not be shown, with the time that is left."""

    until: float
    parity: dict[str, float] = field(default_factory=dict)
    speed: list[dict[str, Any]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    matrix_product_tflops: float = 0.0

    def left_s(self) -> float:
        return self.until - time.monotonic()

    def save(self) -> None:
        facts = {name: getattr(self, name) for name in ("parity", "speed", "failed", "left_out")}
        if not torch.cuda.is_available():
            return  # that the script runs is no result
        facts |= {"matrix_product_tflops": self.matrix_product_tflops, "machine": describe_machine()}
        save_result("gpu", facts["machine"]["gpus"][0], facts)


def make_samples(lengths: list[int], vocab_size: int, seed: int = 0) -> list[Sample]:
    """Sequences of random pieces with the usual share of predictions: speed does not depend on their sense."""
    rng = np.random.default_rng(seed)
    samples = []
    for number, length in enumerate(lengths):
        count = max(1, round(0.15 * length))
        positions = np.sort(rng.choice(np.arange(1, length), count, replace=False))
        row = Row(rng.integers(5, vocab_size, length), (np.arange(length) > length // 2).astype(np.int64), number)
        labels = rng.integers(5, vocab_size, count)
        samples.append(Sample(row, positions, labels, number % 2, Span(0, 0, 1), Span(0, 1, 2)))
    return samples


def batch_of(samples: list[Sample], layout: str, device: torch.device) -> Batch:
    return {name: torch.from_numpy(value).to(device) for name, value in lay_out(samples, layout, 0).items()}


def loss_and_gradients(
    model: PretrainingModel, batch: Batch, precision: torch.dtype | None
) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    mlm, nsp = loss_sums(forward(model, batch, precision), batch)
    loss = mlm / len(batch["mlm_labels"]) + nsp / len(batch["nsp_labels"])
    loss.backward()
    return loss.item(), {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}


def check_parity(device: torch.device, found: Found) -> None:
    """Every way of computing an update against padded FP32 on the CPU; the compiled ones last, as they take longest."""
    samples = make_samples([48, 7, 128, 33, 90, 64], PARITY.vocab_size)
    for compiled, causal in ((False, False), (False, True), (True, False), (True, True)):
        torch.manual_seed(1)
        model = PretrainingModel(PARITY.model_copy(update={"is_decoder": causal}))
        loss, gradients = loss_and_gradients(model, batch_of(samples, "padded", torch.device("cpu")), None)
        largest = max(float(g.abs().max()) for g in gradients.values())
        model.to(device)
        for block in model.encoder.blocks if compiled else ():
            block.compile()
        for layout, (precision, tolerance) in itertools.product(
            ("unpadded", "padded"), ((torch.bfloat16, 5e-2), (None, 1e-4))
        ):
            name = f"{layout}, {'bf16' if precision else 'fp32'}"
            name += (", causal" if causal else "") + (", compiled" if compiled else "")
            if found.left_s() < (NEEDED_S if compiled else 10):
                found.left_out.append(f"parity {name}: no time left")
                continue
            try:
                other, others = loss_and_gradients(model, batch_of(samples, layout, device), precision)
            except Exception as error:
                found.failed.append(f"parity {name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
                continue
            worst = max(float((others[n] - g).abs().max()) / largest for n, g in gradients.items())
            difference = max(abs(other - loss) / loss, worst)
            found.parity[name] = difference
            print(f"parity {name:<36} {difference:.1e} (at most {tolerance:.0e})", flush=True)
            if not difference <= tolerance:
                found.failed.append(f"parity {name}: {difference:.2e} is above {tolerance:.0e}")


def measure(
    preset: str, tokens: int, batch_size: int, at_once: int, device: torch.device, found: Found, compiled: str
) -> None:
    """Updates of one size; a run that does not fit into memory is tried with half as many sequences at once."""
    config = EncoderConfig(vocab_size=30_528, **load_preset(preset)["model"])
    settings = PretrainConfig(
        batch_size=batch_size, sequence_length=tokens, precision="bf16", warmup_steps=0, compile=compiled
    )
    torch.manual_seed(0)
    model = PretrainingModel(config).to(device)
    model.train()
    learner = Learner(model, settings, Processes(0, 1, device), torch.bfloat16)
    learner.begin(Phase(1000, tokens, batch_size, 1e-5, 0))
    samples = make_samples([tokens] * batch_size, config.vocab_size)
    while True:
        chunks = [samples[i : i + at_once] for i in range(0, batch_size, at_once)]
        on_cpu = [batch_of(chunk, "unpadded", torch.device("cpu")) for chunk in chunks]
        counts = Counts.of(on_cpu)
        microbatches = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in on_cpu]
        try:
            updates, seconds = _time(learner, microbatches, counts, device, found)
            break
        except torch.OutOfMemoryError:
            if at_once == 1:
                raise
            learner.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            at_once //= 2
    flops = training_flops(config, counts.lengths, counts.predicted)
    result = {
        "preset": preset,
        "tokens": tokens,
        "batch_size": batch_size,
        "at_once": at_once,
        "compile": compiled,
        "updates": updates,
        "sequences_per_s": updates * batch_size / seconds,
        "mfu": updates * flops / seconds / (found.matrix_product_tflops * 1e12),
        "peak_memory_gib": torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None,
        "bar_sequences_per_s": BARS.get((preset, tokens)),
    }
    found.speed.append(result)
    bar = f", bar on an H200 {result['bar_sequences_per_s']}" if result["bar_sequences_per_s"] else ""
    memory = f", {result['peak_memory_gib']:.1f} GiB" if result["peak_memory_gib"] else ""
    print(
        f"{preset} at {tokens}: {result['sequences_per_s']:,.1f} sequences/s, MFU {result['mfu']:.1%}{memory}, "
        f"{at_once} at once{bar}",
        flush=True,
    )


def _time(
    learner: Learner, microbatches: list[Batch], counts: Counts, device: torch.device, found: Found
) -> tuple[int, float]:
    def update(number: int) -> None:
        outcome = learner.update(number, microbatches, counts.predicted, counts.pairs)  # its losses are waited for
        if not np.isfinite(outcome.loss):
            raise FloatingPointError(f"the loss of update {number} is {outcome.loss}")

    for number in range(SETTLE):
        update(number)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    started, number = time.perf_counter(), 0
    while (seconds := time.perf_counter() - started) < min(MEASURE_S[device.type], found.left_s()) or number < 3:
        update(SETTLE + number)
        number += 1
    return number, seconds


def run(minutes: float) -> Found:
    found = Found(time.monotonic() + 60 * minutes)
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if on_cuda else "cpu")
    print(f"{describe_machine()['gpus'] or 'no CUDA device'}, torch {torch.__version__}", flush=True)
    if not on_cuda:
        found.left_out.append("everything on a GPU: this machine has no CUDA device")
    found.matrix_product_tflops = matrix_product_rate(device, torch.bfloat16) / 1e12
    print(f"matrix product in bf16: {found.matrix_product_tflops:,.2f} TFLOP/s", flush=True)
    if on_cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        found.left_out.append("speed: this GPU does not multiply bf16")
    for number, (preset, tokens, batch_size, at_once) in enumerate(RUNS if on_cuda else (("tiny", 128, 8, 4),)):
        if number == 2:  # the bars first, then parity, then the rest
            check_parity(device, found)
            found.save()
        if found.left_s() < NEEDED_S and on_cuda:
            found.left_out.append(f"{preset} at {tokens}: no time left")
            continue
        for compiled in ("auto", "off"):
            try:
                measure(preset, tokens, batch_size, at_once, device, found, compiled)
                break
            except Exception as error:
                why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                found.failed.append(f"{preset} at {tokens}, compile {compiled}: {why}")
        found.save()
    if not on_cuda:
        check_parity(device, found)
        found.save()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = run(options.minutes)
    for line in found.left_out:
        print(f"not shown: {line}")
    for line in found.failed:
        print(f"FAILED: {line}")
    if options.json:
        print(json.dumps({"parity": found.parity, "speed": found.speed, "failed": found.failed}))
    sys.exit(1 if found.failed else 0)


if __name__ == "__main__":
    main()
