"""Pre-training from a corpus: the objectives of BERT, from random weights or a checkpoint, on one core or many GPUs.

(Devlin et al. 2019, sections 3.1 and A.2.)

While a training runs, its checkpoints and logs are in `NAME.training` beside its place; whatever ends it, an error, a
signal or the power, the same command goes on from the last checkpoint. `NAME` appears when all is done, whole.
"""

import contextlib
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bertship import artifacts
from bertship.config import MACHINE_FIELDS, EncoderConfig, PretrainConfig
from bertship.errors import CheckFailed
from bertship.progress import progress, to_stderr
from bertship.tokenization import Tokenizer
from train.batches import Phase, Updates, iterate, layout_of, phases_of
from train.checkpoint import load_model, save_model
from train.corpus import SPLITS, Corpus
from train.dataset import PretrainingDataset
from train.distributed import Processes, device_name, join
from train.flops import matrix_product_rate, training_flops
from train.learner import Learner, Outcome, Progress
from train.memory import kept_memory
from train.model import count_parameters
from train.objectives import OBJECTIVES, describe, evaluate
from train.optim import pick_precision
from train.pretrain_report import write_report
from train.snapshots import (
    Snapshot,
    Snapshots,
    check_claim,
    claim,
    held,
    link_tree,
    load_optimizer,
    optimizer_tensors,
)
from train.start import check_fit, start_model
from train.watch import Board, MetricsLog, StopRequest, UpdateGuard, stop_request, weights_state

Report = Callable[[str], None]
_MODULES = (
    *("attention", "batches", "bert_adam", "checkpoint", "dataset", "dropout", "heads", "learner", "masking", "model"),
    *("objectives", "optim", "packing", "pretrain", "start"),
)
_CODE = ("bertship/tokenization.py", *(f"train/{name}.py" for name in _MODULES))


def recipe_of(
    corpus_dir: Path, model_config: EncoderConfig | None, config: PretrainConfig, init: Path | None
) -> dict[str, Any]:
    """All that decides what is learnt, rounding apart; an interrupted training goes on under an equal one alone."""
    return {
        "corpus": artifacts.sha256_json(artifacts.read_manifest(corpus_dir, "corpus")["files"]),
        "init": {path.name: artifacts.sha256_file(path) for path in sorted(init.glob("*")) if path.is_file()}
        if init
        else None,
        "model": model_config.model_dump() if model_config and not init else None,
        "pretrain": config.model_dump(mode="json", exclude=set(MACHINE_FIELDS)),
    }


def fingerprint_of(
    corpus_dir: Path, model_config: EncoderConfig | None, config: PretrainConfig, init: Path | None = None
) -> str:
    """What `pretrain` would record: corpus, configurations, warm start, code and torch's version. InputError."""
    return artifacts.sha256_json(
        {
            **recipe_of(corpus_dir, model_config, config, init),
            "machine": config.model_dump(include=set(MACHINE_FIELDS)),
            "code": code_of(),
            "torch": artifacts.versions().get("torch"),
        }
    )


def code_of() -> str:
    """Hash of the source files that a result depends on."""
    return artifacts.code_digest(Path(__file__).parents[1], _CODE)


def pretrain(
    corpus_dir: Path,
    out_dir: Path,
    model_config: EncoderConfig | None,
    config: PretrainConfig,
    report: Report = to_stderr,
    init: Path | None = None,
    restart: bool = False,
) -> dict[str, Any]:
    """Train a model on a corpus directory, write `out_dir` and return its manifest.

    The model has random weights by `model_config`, or those of the model directory `init`: its heads are kept where
    they are the objective's, and the corpus must have its vocabulary, perhaps with more pieces after it, which get
    rows of their own. `restart` forgets an interrupted training instead of going on with it.

    `out_dir` gets `model/` (Hugging Face layout), `checkpoints/` (`train.snapshots`), `metrics.jsonl` (one object an
    update), `heldout.jsonl` (one an evaluation), `tensorboard/`, `report.html` and `manifest.json`, whose metrics are
    those of `evaluate` before and after, and:

        tokens_per_s       real tokens, padding apart, a second of training
        padding_share      of the positions that were computed
        mfu                of the matrix product's measured rate in the same precision, `matrix_product_tflops`
        order_hash         SHA-256 of the first epoch's order: equal for equal data, seed and length
        is_next_share      measured over the samples of the training
        skipped_updates    whose gradient was not finite
        best_checkpoint    the updates of the one with the lowest held-out loss

    On one machine, equal inputs, seed, processes and threads give equal losses, interrupted or not. Under torchrun
    every process calls this. Raises InputError where configuration and corpus do not fit or an interrupted training
    has other settings or is another process's, CheckFailed when SKIPS_IN_A_ROW updates in a row or a held-out loss were
    not finite.
    """
    with join() as processes, kept_memory(), contextlib.ExitStack() as stack:
        return _Training(corpus_dir, out_dir, model_config, config, report, init, restart, processes, stack).run()


class _Training:
    """One call of `pretrain`: what it was given, checked, and what it makes of it."""

    def __init__(
        self,
        corpus_dir: Path,
        out_dir: Path,
        model_config: EncoderConfig | None,
        config: PretrainConfig,
        report: Report,
        init: Path | None,
        restart: bool,
        processes: Processes,
        stack: contextlib.ExitStack,
    ) -> None:
        self.corpus_dir, self.out_dir, self.init = corpus_dir, out_dir, init
        self.config, self.processes = config, processes
        self.report: Report = report if processes.main else lambda line: None
        self.recipe = recipe_of(corpus_dir, model_config, config, init)
        self.fingerprint = fingerprint_of(corpus_dir, model_config, config, init)
        self.tokenizer = Tokenizer.from_dir(corpus_dir)
        # held open to the end: another corpus may be made in the same place while this one is trained on
        self.corpora = {split: Corpus.open(corpus_dir, split) for split in SPLITS}
        self.objective, self.phases = OBJECTIVES[config.objective], phases_of(config)
        self.precision = pick_precision(config.precision, processes.device)
        self.layout = layout_of(config)
        for phase in self.phases:  # what is wrong with the second is said now, not after days
            self._updates(phase, "train", phase.steps)

        self.home = out_dir.with_name(f"{out_dir.name}.training")
        self.snapshots = Snapshots(self.home / "checkpoints", config.keep_checkpoints)
        processes.wait()  # all have judged the inputs before one changes anything
        processes.judge(lambda: self._take_home(stack, restart))
        snapshot = self._newest()
        torch.manual_seed(config.seed)
        if snapshot:
            self.model, _ = load_model(self.objective.model, snapshot.path)
        else:
            self.model = start_model(self.objective, model_config, init, corpus_dir, self.tokenizer, self.report)
        check_fit(self.model.config, self.tokenizer, self.phases, corpus_dir)
        self.model.to(processes.device)
        self.learner = Learner(self.model, config, processes, self.precision)
        for phase in self.phases[::-1]:  # the last call, of the first phase, counts until the training begins
            self.learner.begin(phase)
        self.done, self.before, self.schedule_state = Progress(), dict[str, float](), None
        if snapshot:
            load_optimizer(self.learner.optimizer, self.model, snapshot.path)
            self.done, self.before = Progress(**snapshot.state["progress"]), snapshot.state["before"]
            self.schedule_state = snapshot.state["schedule"]
            changed = "" if snapshot.state["code"] == code_of() else "; the code has changed since it was written"
            self.report(f"going on after update {self.done.update}, from {snapshot.path}{changed}")
        self.after: dict[str, float] = {}
        self.guard = UpdateGuard(skipped=self.done.skipped, in_a_row=self.done.in_a_row)
        self.peak = matrix_product_rate(processes.device, self.precision)

    def _take_home(self, stack: contextlib.ExitStack, restart: bool) -> None:
        stack.enter_context(held(self.home))
        check_claim(self.home, self.recipe, restart)

    def _newest(self) -> Snapshot | None:
        """The main process's choice: the others must not see another one."""
        found = self.snapshots.newest(self.report) if self.processes.main else None
        step = int(self.processes.agree(str(found.step if found else -1)))
        return found or (self.snapshots.read(step) if step >= 0 else None)

    def run(self) -> dict[str, Any]:
        self._announce()
        if self.processes.main:
            claim(self.home, self.recipe)
        if not self.before:
            self.before = self._evaluate(self.phases[0])
        self.report(f"held out before: {describe(self.before)}")
        total, done = sum(phase.steps for phase in self.phases), self.done
        with (
            self._board() as board,
            self._log("metrics", board) as log,
            self._log("heldout", board) as heldout,
            stop_request() as stop,
            progress("pre-training", total, self.report, done.update) as advance,
        ):
            for number in range(done.phase, len(self.phases)):
                if number != done.phase:  # a new schedule, and nothing else anew
                    done.phase, done.phase_update, self.schedule_state = number, 0, None
                self._train(self.phases[number], log, heldout, stop, advance)
        self.after = self.after or self._evaluate(self.phases[-1])  # it had ended, but was not published
        self.report(f"held out after:  {describe(self.after)}")
        if self.processes.main:
            self._publish()
        self.processes.wait()
        return artifacts.read_manifest(self.out_dir, "pretrain")

    def _train(
        self, phase: Phase, log: MetricsLog, heldout: MetricsLog, stop: StopRequest, advance: Callable[[str], None]
    ) -> None:
        done, device = self.done, self.processes.device
        self.learner.begin(phase, self.schedule_state)
        workers = self.config.data_workers
        if workers is None:
            workers = 4 if device.type == "cuda" else 0
        self.model.train()
        started = time.perf_counter()
        updates = self._updates(phase, "train", phase.steps)
        for counts, microbatches in iterate(updates, done.phase_update, workers, device):
            if self.processes.sum(bool(stop))[0]:
                self._leave(stop)
            flops = training_flops(self.model.config, counts.lengths, counts.predicted, self.objective.nsp)
            sums = self.processes.sum(
                counts.predicted, counts.pairs, counts.tokens, counts.computed, counts.is_next, flops
            )
            outcome = self.learner.update(done.update, microbatches, sums[0], sums[1])
            seconds = time.perf_counter() - started
            done.add(sums[1:], seconds)
            self._note(outcome, sums[2] / seconds, log, advance)
            last = done.phase_update == phase.steps
            if last or done.update % self.config.checkpoint_every == 0:
                self._evaluate_and_save(phase, heldout)
            started = time.perf_counter()

    def _note(self, outcome: Outcome, rate: float, log: MetricsLog, advance: Callable[[str], None]) -> None:
        """Write the update down; stop a run that makes none any more."""
        if self.processes.main:
            facts = {
                "step": self.done.update,
                "loss": outcome.loss,
                "mlm_loss": outcome.mlm_loss,
                **({"nsp_loss": outcome.nsp_loss} if self.objective.nsp else {}),
                "lr": outcome.lr,
                "grad_norm": outcome.grad_norm,
                "tokens_per_s": round(rate),
            }
            log.write(facts, "training")
        self.guard.saw(
            outcome.applied,
            lambda in_a_row: self._diagnosis(
                f"{in_a_row} gradients in a row were not finite",
                f"language model loss {outcome.mlm_loss:.4g}, NSP loss {outcome.nsp_loss:.4g}, learning rate "
                f"{outcome.lr:.3g}",
            ),
        )
        self.done.skipped, self.done.in_a_row = self.guard.skipped, self.guard.in_a_row
        done = self.done
        advance(f"loss {outcome.loss:.3f}, {done.tokens / done.seconds:,.0f} tokens/s, MFU {self._mfu():.0%}")

    def _evaluate(self, phase: Phase) -> dict[str, float]:
        updates = self._updates(phase, "heldout", self.config.heldout_batches)
        return evaluate(self.model, updates, self.precision, self.processes)

    def _evaluate_and_save(self, phase: Phase, heldout: MetricsLog) -> None:
        self.after = self._evaluate(phase)
        facts = {"step": self.done.update, **self.after}
        if self.processes.main:
            heldout.write(facts, "held out")
        if not all(math.isfinite(self.after.get(name, 0.0)) for name in ("mlm_loss", "nsp_loss")):
            # no checkpoint of it, which would push out a good one
            raise CheckFailed(self._diagnosis("the held-out loss is not finite", describe(self.after)))
        self._save(self.after["mlm_loss"])
        if self.done.update < sum(phase.steps for phase in self.phases):
            self.report(f"held out at update {self.done.update}: {describe(self.after)}")

    def _save(self, held_out: float | None) -> None:
        """A checkpoint of this moment; `held_out`: the loss it is judged by, None where it was not measured."""
        self.learner.consolidate()
        if self.processes.main:
            state = {
                "progress": asdict(self.done),
                "schedule": self.learner.schedule_state(),
                "before": self.before,
                "code": code_of(),
                "held_out": held_out if held_out is None or math.isfinite(held_out) else None,
            }
            moments = optimizer_tensors(self.learner.optimizer, self.model)
            self.snapshots.save(self.done.update, self.model, self.tokenizer, moments, state, **self._saved_as())
        self.processes.wait()

    def _leave(self, stop: StopRequest) -> None:
        self._save(None)
        self.report(f"stopped after update {self.done.update}; the same command goes on from there")
        stop.leave()

    def _publish(self) -> None:
        done, before = self.done, self.before
        with artifacts.publish(self.out_dir) as staging:
            for name in ("metrics.jsonl", "heldout.jsonl", "tensorboard", "checkpoints"):
                link_tree(self.home / name, staging / name)
            (staging / "model").mkdir()
            save_model(self.model, self.tokenizer, staging / "model", **self._saved_as())
            metrics = {
                "before": before,
                "after": self.after,
                "order_hash": self._dataset(self.phases[0], "train").order_hash(),
                "tokens_per_s": done.tokens / max(done.seconds, 1e-9),
                "padding_share": 1 - done.tokens / max(done.computed, 1),
                "mfu": self._mfu(),
                "matrix_product_tflops": self.peak / 1e12,
                "is_next_share": done.is_next / max(done.pairs, 1),
                "skipped_updates": done.skipped,
                "best_checkpoint": self.snapshots.best(),
            }
            facts: dict[str, Any] = {
                "config": {"model": self.model.config.model_dump(), "pretrain": self.config.model_dump()},
                "inputs": {"corpus": str(self.corpus_dir), "init": str(self.init) if self.init else None},
                "metrics": metrics,
                "device": device_name(self.processes.device),
                "processes": self.processes.count,
                "precision": str(self.precision or torch.float32).removeprefix("torch."),
                "layout": self.layout,
                "parameters": count_parameters(self.model),
            }
            write_report(staging, facts)
            artifacts.write_manifest(staging, "pretrain", fingerprint=self.fingerprint, **facts)
        shutil.rmtree(self.home)

    def _announce(self) -> None:
        config, device = self.config, self.processes.device
        epochs = sum(p.steps * p.batch_size / len(self._dataset(p, "train")) for p in self.phases)
        plan = ", then ".join(f"{p.steps} updates of {p.batch_size} x {p.sequence_length} tokens" for p in self.phases)
        others = torch.cuda.device_count() - self.processes.count if device.type == "cuda" else 0
        self.report(
            f"pre-training ({config.objective}) {count_parameters(self.model):,} parameters on "
            f"{self.processes.count} x {device_name(device)}, "
            f"{str(self.precision or torch.float32).removeprefix('torch.')}, rows {self.layout}: {plan}; "
            f"{epochs:.1f} epochs"
            + (f"; {others} more GPUs are here, GPUS={torch.cuda.device_count()} uses all" if others > 0 else "")
        )
        for split, part in zip(SPLITS, ("training", "held-out"), strict=True):
            if self.objective.nsp and len(self.corpora[split]) < 2:
                self.report(
                    f"WARNING: the {part} part of {self.corpus_dir} is one document, so that all of its pairs are "
                    "IsNext: NSP accuracy on it says nothing; give more documents or a larger heldout_share"
                )

    def _dataset(self, phase: Phase, split: str) -> PretrainingDataset:
        return PretrainingDataset(self.corpora[split], phase.sequence_length, self.config, self.tokenizer)

    def _updates(self, phase: Phase, split: str, steps: int) -> Updates:
        dataset, processes = self._dataset(phase, split), self.processes
        return Updates(dataset, steps, phase.batch_size, self.config, self.layout, processes.rank, processes.count)

    def _board(self) -> Board | contextlib.nullcontext[None]:
        return Board(self.home / "tensorboard", self.done.update) if self.processes.main else contextlib.nullcontext()

    def _log(self, name: str, board: Board | None) -> MetricsLog | contextlib.nullcontext[Any]:
        """The main process's log; the others write none."""
        if not self.processes.main:
            return contextlib.nullcontext()
        return MetricsLog(self.home / f"{name}.jsonl", self.done.update, board)

    def _saved_as(self) -> dict[str, Any]:
        return {"architectures": ["BertLMHeadModel"]} if self.objective.causal else {}

    def _mfu(self) -> float:
        return self.done.flops / max(self.done.seconds, 1e-9) / (self.peak * self.processes.count)

    def _diagnosis(self, what: str, figures: str) -> str:
        """`what` was seen in the last update, with its `figures`."""
        steps = self.snapshots.steps()
        saved = "there is no checkpoint yet; begin anew (--force)"
        if steps:
            saved = f"the last checkpoint is {self.snapshots.path(steps[-1])}; start from it (INIT) or anew (--force)"
        return (
            f"pre-training stopped at update {self.done.update}: {what} ({figures}; {weights_state(self.model)}); "
            f'{saved} with a lower learning_rate, longer warmup_steps, or precision = "fp32"'
        )
