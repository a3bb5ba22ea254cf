"""The course of a fine-tuning: updates, evaluations, the best model, snapshots, and going on from them."""

import contextlib
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from bertship.artifacts import clear_directory
from bertship.config import FinetuneConfig
from bertship.errors import CheckFailed, counted
from bertship.pipeline import Runner
from bertship.progress import progress
from bertship.tasks import Example, Task
from bertship.tasks.base import Answers
from bertship.tokenization import Tokenizer
from train.checkpoint import load_model
from train.distributed import Processes
from train.divided_runner import DividedRunner, Interrupted
from train.features import FeatureModel, cache_features, model_class
from train.finetune_batches import Units, batches
from train.finetune_learner import FinetuneLearner, Outcome
from train.finetune_start import Report, start_model
from train.heads import HeadedModel
from train.optim import restore_schedule, schedule_state
from train.scoring import answer, columns_of, evaluate, served
from train.snapshots import LOCK, Snapshot, Snapshots, check_claim, claim, held, load_optimizer, optimizer_tensors
from train.torch_runner import TorchRunner
from train.watch import MetricsLog, StopRequest, UpdateGuard, stop_request, weights_state

BEST = "best.safetensors"  # in a snapshot: the weights of the best evaluation so far
SNAPSHOTS_KEPT = 2
SNAPSHOT_SHARE = 0.05  # of the time, at most, goes into snapshots


def home_of(out: Path) -> Path:
    """Where a training of the run `out` keeps what it has while it lasts."""
    return out.with_name(f"{out.name}.training")


@dataclass
class Progress:
    """How far a training is and what it has counted; its snapshots save it."""

    update: int = 0  # done
    judged: int = 0  # the update after which the dev split was evaluated last
    over: bool = False  # before all updates, as nothing got better
    worse: int = 0  # evaluations since the best one
    skipped: int = 0  # updates
    in_a_row: int = 0  # of them, up to now
    tokens: int = 0  # real ones
    computed: int = 0  # positions, padding included
    seconds: float = 0  # of updates and snapshots


@dataclass
class Best:
    """The best evaluation so far, and the weights that it judged; none are held where there is one evaluation alone.

    `task` has what was chosen on the dev split. Of one that a snapshot brought, that and the answers are missing.
    """

    step: int
    metrics: dict[str, float]
    task: Task
    answers: Answers | None
    weights: dict[str, Tensor] = field(default_factory=dict)


class Training:
    """One call of `train.finetune.finetune`: what it was given, checked, and what it makes of it.

    `recipe`, `code`: what decides whether an interrupted training is this one, and whether it can go on. What is kept
    while it lasts is this process's alone until `stack` is closed. Raises InputError.
    """

    def __init__(
        self,
        task: Task,
        init: Path,
        out: Path,
        config: FinetuneConfig,
        train: Sequence[Example],
        dev: Sequence[Example],
        report: Report,
        recipe: dict[str, Any],
        code: str,
        restart: bool,
        processes: Processes,
        stack: contextlib.ExitStack,
    ) -> None:
        self.task, self.config, self.dev, self.processes = task, config, dev, processes
        self.recipe, self.code, self.report = recipe, code, report
        self.tokenizer = Tokenizer.from_dir(init)
        self.home = home_of(out)
        self.log_path = self.home / "metrics.jsonl"
        self.snapshots = Snapshots(self.home / "snapshots", SNAPSHOTS_KEPT)
        processes.wait()  # all have read the inputs before one changes anything
        processes.judge(lambda: self._take_home(stack, restart))
        snapshot = self._newest()
        torch.manual_seed(config.seed)
        self.model: HeadedModel
        if snapshot:
            self.model, _ = load_model(model_class(task), snapshot.path, task.behaviour.width(task))
        else:
            self.model = start_model(task, init, self.tokenizer, train, self.report)
        self.model.to(processes.device)

        units = Units.of(task, self.tokenizer, train)
        cache = None
        if isinstance(self.model, FeatureModel):
            with processes.main_first():
                folder, pad_id = out.parent / ".features", self.tokenizer.pad_id
                cache = cache_features(self.model, units.rows, pad_id, folder, init, self.report)
        self.learner = FinetuneLearner(task, self.model, units, config, processes, self.tokenizer.pad_id, cache)
        self.done = Progress()
        self.best: Best | None = None
        self.loss = 0.0
        if snapshot:
            self._go_on(snapshot)
        self.guard = UpdateGuard(skipped=self.done.skipped, in_a_row=self.done.in_a_row)
        self.saved, self.cost_s = time.monotonic(), 0.0
        precision = str(self.learner.precision or torch.float32).removeprefix("torch.").replace("float32", "fp32")
        self.report(
            f"{len(train):,} examples, {len(units.rows):,} rows, {self.learner.steps:,} updates of {config.batch_size} "
            f"in {precision} on {f'{processes.count} x ' if processes.count > 1 else ''}{processes.device.type}"
            + self._floor()
        )

    def _floor(self) -> str:
        """Where the least number of updates makes more than the epochs ask for, how many epochs they are."""
        learner, config = self.learner, self.config
        if learner.steps == learner.asked:
            return ""
        return (
            f": about {self.epochs_of(learner.steps):.3g} epochs, as min_updates = {config.min_updates} "
            f"({config.epochs:g} epochs alone are {counted(learner.asked, 'update')}; --set epochs=N counts as it is)"
        )

    def epochs_of(self, updates: int) -> float:
        """Passes over the training examples that so many updates are."""
        return updates * self.config.batch_size / len(self.learner.units.units)

    def _take_home(self, stack: contextlib.ExitStack, restart: bool) -> None:
        stack.enter_context(held(self.home))
        check_claim(self.home, self.recipe, restart)

    def _newest(self) -> Snapshot | None:
        """The main process's choice: the others must not see another one."""
        found = self.snapshots.newest(self.report) if self.processes.main else None
        if found and found.state["code"] != self.code:
            self.report(f"the code has changed since {found.path} was written: training begins anew")
            found = None
        if self.processes.main and not found:
            clear_directory(self.home, but=LOCK)
        step = int(self.processes.agree(str(found.step if found else -1)))
        return found or (self.snapshots.read(step) if step >= 0 else None)

    def _go_on(self, snapshot: Snapshot) -> None:
        state = snapshot.state
        load_optimizer(self.learner.optimizer, self.model, snapshot.path)
        restore_schedule(self.learner.schedule, state["schedule"])
        self.done = Progress(**state["progress"])
        if state["best"]:
            stored = snapshot.path / BEST
            weights = load_file(stored) if stored.is_file() else {}
            self.best = Best(**state["best"], task=self.task, answers=None, weights=weights)
        self.report(f"going on after update {self.done.update}, from {snapshot.path}")

    def run(self, more: Mapping[str, Sequence[Example]]) -> tuple[Best, dict[str, float]]:
        """Train, and leave the best model in `model`, whole; its evaluation, and the metrics of all splits.

        `more`: as `train.finetune.finetune` explains it. Raises CheckFailed when training diverges.
        """
        with self._log() as log, stop_request() as stop:
            runner = DividedRunner(TorchRunner(self.model, self.tokenizer.pad_id), self.processes, lambda: bool(stop))
            try:
                self._train(log, stop, runner)
                best = self._whole_best(runner)
                metrics = best.metrics | served(best.task, self.tokenizer, runner, self.dev, self.report)
                for prefix, examples in more.items():
                    found, _ = evaluate(best.task, self.tokenizer, runner, examples, self.report)
                    metrics |= {f"{prefix}_{name}": value for name, value in found.items()}
            except Interrupted:
                self._leave(stop)
                raise
            except CheckFailed:
                self.forget()  # to go on would be to fail again
                raise
        return best, metrics

    def forget(self) -> None:
        """Remove what the training kept while it lasted."""
        if self.processes.main:
            shutil.rmtree(self.home, ignore_errors=True)

    def _train(self, log: MetricsLog | None, stop: StopRequest, runner: Runner) -> None:
        """All updates that are left, the dev split evaluated on the way."""
        done, config, steps = self.done, self.config, self.learner.steps
        stops = {round(steps * (k + 1) / config.evaluations) for k in range(config.evaluations)} | {steps}
        if self._to_be_judged(stops):  # when it ended, an evaluation was under way
            self._judge(log, runner)
        drawn = batches(self.learner.units.lengths(), config, done.update)
        with progress("fine-tuning", steps, self.report, done.update) as advance:
            while done.update < steps and not done.over:
                started = time.perf_counter()
                self._note(self.learner.update(done.update, next(drawn).tolist()), log)
                asked, due = self.processes.sum(bool(stop), self.processes.main and self._due())
                if asked:
                    self._leave(stop)
                to_be_judged = self._to_be_judged(stops)
                done.seconds += time.perf_counter() - started
                advance(f"loss {self.loss:.3f}, {done.tokens / done.seconds:,.0f} tokens/s")
                if to_be_judged:
                    self._judge(log, runner)
                if due:
                    self._save()

    def _to_be_judged(self, stops: set[int]) -> bool:
        done = self.done
        nothing_learnt = done.skipped == done.update == self.learner.steps
        return done.update in stops and done.judged < done.update and not nothing_learnt

    def _note(self, outcome: Outcome, log: MetricsLog | None) -> None:
        """Write the update down; stop a run that makes none any more."""
        done = self.done
        done.update += 1
        done.tokens, done.computed = done.tokens + outcome.tokens, done.computed + outcome.computed
        self.loss = outcome.loss
        if log:
            log.write({"step": done.update, "loss": outcome.loss, "lr": outcome.lr, "norm": outcome.norm})
        self.guard.saw(outcome.applied, self._diagnosis)
        done.skipped, done.in_a_row = self.guard.skipped, self.guard.in_a_row

    def _diagnosis(self, in_a_row: int) -> str:
        return (
            f"fine-tuning {self.task.name} diverged: {in_a_row} updates in a row had non-finite gradients at step "
            f"{self.done.update} ({weights_state(self.model)}); lower learning_rate {self.config.learning_rate:g}"
        )

    def _judge(self, log: MetricsLog | None, runner: Runner) -> None:
        """Evaluate the dev split under the model as it is, and keep it where it is the best so far."""
        done, config, metric = self.done, self.config, self.task.metrics[0]
        self.learner.whole()
        found = self._evaluated(runner, done.update)
        if log:
            log.write({"step": done.update, "dev": found.metrics})
        done.judged, done.worse = done.update, done.worse + 1
        if self.best is None or found.metrics[metric] > self.best.metrics[metric]:
            if config.evaluations > 1:
                found.weights = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
            self.best, done.worse = found, 0
        if config.evaluations > 1:
            now, best = found.metrics[metric], self.best.metrics[metric]
            self.report(f"step {done.update}: {metric} {now:.4f}, best {best:.4f}")
        else:
            self.report(f"dev split after update {done.update}: {metric} {found.metrics[metric]:.4f}")
        if config.patience and done.worse >= config.patience:
            self.report(f"no better {metric} in {done.worse} evaluations: stopping at step {done.update}")
            done.over = True
        self.learner.training()

    def _evaluated(self, runner: Runner, step: int) -> Best:
        """The dev split under the whole model, and what is chosen on it."""
        kind, columns = self.task.behaviour, columns_of(self.task, self.dev, annotations=True)
        answers = answer(self.task, self.tokenizer, runner, columns, self.report, "evaluating")
        task, answers = kind.tune(self.task, self.dev, answers)
        return Best(step, kind.score(task, self.dev, answers), task, answers)

    def _whole_best(self, runner: Runner) -> Best:
        """The best evaluation, and the model as it judged it. Raises CheckFailed where there was no update at all."""
        if self.best is None:
            raise CheckFailed(f"fine-tuning {self.task.name} made no update: every gradient was non-finite; check INIT")
        self.learner.whole()
        if self.best.weights:
            self.model.load_state_dict(self.best.weights)
        return self._evaluated(runner, self.best.step) if self.best.answers is None else self.best

    def _due(self) -> bool:
        """Whether it is time for a snapshot: that of a large model takes long, so it is made more seldom."""
        every_s = self.config.snapshot_every_s
        return time.monotonic() - self.saved >= (max(every_s, self.cost_s / SNAPSHOT_SHARE) if every_s else 0)

    def _save(self) -> None:
        """A snapshot of this moment."""
        started = time.monotonic()
        if self.processes.main:
            self.learner.training()
            moments = optimizer_tensors(self.learner.optimizer, self.model)
            best = self.best
            state = {
                "progress": asdict(self.done),
                "schedule": schedule_state(self.learner.schedule),
                "best": {"step": best.step, "metrics": best.metrics} if best else None,
                "code": self.code,
            }
            weights = {name: t.cpu().contiguous() for name, t in best.weights.items()} if best else {}
            also = {BEST: weights} if weights else None
            self.learner.whole()
            claim(self.home, self.recipe)
            self.snapshots.save(self.done.update, self.model, self.tokenizer, moments, state, also)
            self.learner.training()
        self.processes.wait()
        self.saved = time.monotonic()
        self.cost_s = self.saved - started
        self.done.seconds += self.cost_s

    def _leave(self, stop: StopRequest) -> None:
        self._save()
        self.report(f"stopped after update {self.done.update}; the same command goes on from there")
        stop.leave()

    def _log(self) -> MetricsLog | contextlib.nullcontext[None]:
        """The main process's log; the others write none."""
        if not self.processes.main:
            return contextlib.nullcontext()
        judged = self.done.judged
        return MetricsLog(self.log_path, self.done.update, known=lambda f: "dev" not in f or f["step"] <= judged)
