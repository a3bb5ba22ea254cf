"""Pre-training speed beside Hugging Face's model and collator, in one run: real tokens a second, padding apart.

    python -m benchmarks.pretraining --model 6x384 --minutes 4.5

The same pairs of sentences, in the same order, from the same initial weights, with the same AdamW, threads and number
formats; rounds of a few updates each in turn, so that whatever else the machine does meets all alike. Hugging Face has
its best settings: SDPA, fused AdamW, and features made beforehand, while ours are made in the timed part.

    hf fp32     BertForPreTraining and DataCollatorForLanguageModeling, the vocabulary projected on every position
    hf bf16     the same under bf16 autocast
    ours        this project's training as `make pretrain` runs it (bf16 where the CPU multiplies it natively)
    ours fp32   the same in FP32

At the end all are judged on the same held-out batches, in FP32. Results go to benchmarks/results/pretraining.json.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe_machine, save_result
from bertship.config import EncoderConfig, PretrainConfig
from bertship.tokenization import Tokenizer
from train.batches import Counts, Phase, Updates, iterate, layout_of
from train.checkpoint import our_name
from train.corpus import Corpus, build_corpus
from train.dataset import PretrainingDataset
from train.distributed import Processes
from train.heads import PretrainingModel
from train.learner import Learner
from train.objectives import evaluate
from train.optim import build_optimizer, clip_and_step, linear_schedule, pick_precision
from train.sources import fetch

MODELS = {
    "6x384": ({"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}, 16),
    "base": ({"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}, 8),
    "try": ({"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}, 4),
}
TARGETS = {"6x384": {"hf fp32": 3.0, "hf bf16": 1.8}, "base": {"hf fp32": 2.5, "hf bf16": 1.3}}
DEVICE = torch.device("cpu")


class Contender:
    """Something that makes updates: `run(updates)` gives real tokens, positions computed and seconds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rounds: list[tuple[int, int, float]] = []

    def update(self) -> tuple[int, int]:
        raise NotImplementedError

    def run(self, updates: int) -> None:
        tokens = computed = 0
        started = time.perf_counter()
        for _ in range(updates):
            real, positions = self.update()
            tokens, computed = tokens + real, computed + positions
        self.rounds.append((tokens, computed, time.perf_counter() - started))

    def rate(self) -> float:
        return statistics.median(tokens / seconds for tokens, _, seconds in self.rounds)

    def padding(self) -> float:
        return 1 - sum(tokens for tokens, *_ in self.rounds) / sum(computed for _, computed, _ in self.rounds)


class Ours(Contender):
    def __init__(self, name: str, model: PretrainingModel, dataset: PretrainingDataset, config: PretrainConfig) -> None:
        super().__init__(name)
        self.model, precision = model, pick_precision(config.precision, DEVICE)
        self.learner = Learner(model, config, Processes(0, 1, DEVICE), precision)
        self.learner.begin(Phase(config.steps, 128, config.batch_size, config.learning_rate, config.warmup_steps))
        updates = Updates(dataset, config.steps, config.batch_size, config, layout_of(config))
        self.batches: Iterator[tuple[Counts, list[dict[str, torch.Tensor]]]] = iterate(updates, 0, 0, DEVICE)
        self.number = 0
        model.train()

    def update(self) -> tuple[int, int]:
        counts, microbatches = next(self.batches)
        self.learner.update(self.number, microbatches, counts.predicted, counts.pairs)
        self.number += 1
        return counts.tokens, counts.computed


class HuggingFace(Contender):
    def __init__(
        self,
        name: str,
        start: PretrainingModel,
        dataset: PretrainingDataset,
        config: PretrainConfig,
        tokenizer_dir: Path,
        precision: torch.dtype | None,
    ) -> None:
        from transformers import AutoTokenizer, BertConfig, BertForPreTraining, DataCollatorForLanguageModeling

        super().__init__(name)
        self.model = BertForPreTraining(BertConfig(**start.config.model_dump(), attn_implementation="sdpa"))  # type: ignore[call-arg]
        theirs = {our_name(n): p for n, p in self.model.named_parameters() if "decoder" not in n}
        with torch.no_grad():
            for name_of, tensor in start.state_dict().items():
                theirs[name_of].copy_(tensor)
        self.model.train()
        self.precision, self.config = precision, config
        self.collator = DataCollatorForLanguageModeling(AutoTokenizer.from_pretrained(tokenizer_dir))
        self.optimizer = build_optimizer(self.model, config.learning_rate, config.weight_decay)
        self.schedule = linear_schedule(self.optimizer, config.warmup_steps, config.steps)
        self.updates = Updates(dataset, config.steps, config.batch_size, config, "padded")
        self.number = 0
        self.made: list[list[dict[str, Any]]] = []

    def prepare(self, updates: int) -> None:
        """The features of the next updates, outside the timed part."""
        for number in range(self.number, self.number + updates):
            features = []
            for sample in self.updates.samples(number):
                ids = sample.row.ids.copy()
                ids[sample.positions] = sample.labels  # as before masking: the collator masks
                special = [int(i in self.updates.dataset.tokenizer.special_ids) for i in ids]
                features.append(
                    {
                        "input_ids": ids.tolist(),
                        "token_type_ids": sample.row.types.tolist(),
                        "special_tokens_mask": special,
                        "next_sentence_label": sample.next_label,
                    }
                )
            self.made.append(features)

    def run(self, updates: int) -> None:
        self.prepare(updates)
        super().run(updates)

    def update(self) -> tuple[int, int]:
        torch.manual_seed(self.number)
        batch = self.collator(self.made.pop(0))
        with torch.autocast("cpu", self.precision, enabled=self.precision is not None):
            loss = self.model(**batch).loss
        loss.backward()
        clip_and_step(self.optimizer, self.schedule, self.model.parameters(), self.config.clip_norm)
        self.number += 1
        return int(batch["attention_mask"].sum()), batch["attention_mask"].numel()

    def ours(self, config: EncoderConfig) -> PretrainingModel:
        """Its weights in a model of ours, to be judged by the same code."""
        model = PretrainingModel(config)
        model.load_state_dict({our_name(n): p for n, p in self.model.named_parameters() if "decoder" not in n})
        return model


def prepare_corpus(home: Path) -> tuple[Path, Path]:
    """The packaged Wikipedia text by the warm start's vocabulary of 30,522 pieces, made once."""
    tokenizer_dir = fetch("minilm", print)
    if not (home / "manifest.json").is_file():
        from bertship.config import CorpusConfig

        source = fetch("wikipedia", print) / "wikipedia.xml.bz2"
        build_corpus([source], home, CorpusConfig(), Tokenizer.from_dir(tokenizer_dir), print)
    return home, tokenizer_dir


def measure(model_name: str, minutes: float, threads: int, corpus_dir: Path | None, rows: str) -> dict[str, Any]:
    """Rounds in turn until the time is over; speeds, ratios round by round, held-out losses."""
    started = time.perf_counter()
    torch.set_num_threads(threads)
    corpus_dir, tokenizer_dir = prepare_corpus(corpus_dir or Path("runs/corpus/benchmark"))
    tokenizer = Tokenizer.from_dir(corpus_dir)
    sizes, batch_size = MODELS[model_name]
    config = EncoderConfig(vocab_size=tokenizer.vocab_size, **sizes)
    settings = PretrainConfig(
        steps=2000, batch_size=batch_size, sequence_length=128, warmup_steps=20, heldout_batches=8, rows=rows
    )
    train, heldout = (
        PretrainingDataset(Corpus.open(corpus_dir, split), 128, settings, tokenizer) for split in ("train", "heldout")
    )
    torch.manual_seed(0)
    start = PretrainingModel(config)

    def copy() -> PretrainingModel:
        model = PretrainingModel(config)
        model.load_state_dict(start.state_dict())
        return model

    contenders: list[Contender] = [
        HuggingFace("hf fp32", start, train, settings, tokenizer_dir, None),
        HuggingFace("hf bf16", start, train, settings, tokenizer_dir, torch.bfloat16),
        Ours("ours", copy(), train, settings),
    ]
    if model_name != "base":  # where it would take the time of the others' rounds
        contenders.append(Ours("ours fp32", copy(), train, settings.model_copy(update={"precision": "fp32"})))
    for contender in contenders:
        contender.run(1)
        contender.rounds.clear()  # the first update sets things up
    until = started + 60 * minutes * 0.65  # the rest is the held-out evaluation's
    done = 0
    while time.perf_counter() < until and done < settings.steps - 2:
        for contender in contenders[done % len(contenders) :] + contenders[: done % len(contenders)]:
            contender.run(2)
        done += 1
    ours, peers = contenders[2], contenders[:2]
    ratios = {
        peer.name: [(t / s) / (pt / ps) for (t, _, s), (pt, _, ps) in zip(ours.rounds, peer.rounds, strict=True)]
        for peer in peers
    }
    judged = Updates(heldout, settings.heldout_batches, batch_size, settings, "padded")
    losses = {"start": evaluate(start, judged, None)}
    for contender in contenders:
        model = contender.ours(config) if isinstance(contender, HuggingFace) else contender.model  # type: ignore
        losses[contender.name] = evaluate(model, judged, None)
    return {
        "model": model_name,
        "threads": threads,
        "batch": [batch_size, 128],
        "rows": rows,
        "updates": 2 * done + 1,
        "sequences": (2 * done + 1) * batch_size,
        "tokens_per_s": {c.name: c.rate() for c in contenders},
        "padding_share": {c.name: c.padding() for c in contenders},
        "ratio": {
            name: {"median": statistics.median(values), "least": min(values), "most": max(values)}
            for name, values in ratios.items()
        },
        "target": TARGETS.get(model_name),
        "held_out_loss": {name: found["mlm_loss"] + found["nsp_loss"] for name, found in losses.items()},
        "held_out_mlm_loss": {name: found["mlm_loss"] for name, found in losses.items()},
        "machine": describe_machine(),
    }


def show(result: dict[str, Any]) -> None:
    print(f"{result['model']}, {result['threads']} threads, {result['updates']} updates of {result['batch']} tokens")
    print(f"{'':<10} {'tokens/s':>9} {'padding':>8} {'held-out loss':>14}")
    for name, rate in result["tokens_per_s"].items():
        loss = result["held_out_loss"][name]
        print(f"{name:<10} {rate:>9,.0f} {result['padding_share'][name]:>8.1%} {loss:>14.4f}")
    for name, ratio in result["ratio"].items():
        target = f", to reach {result['target'][name]}" if result["target"] else ""
        print(f"ours / {name}: {ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['most']:.2f}){target}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="6x384")
    parser.add_argument("--minutes", type=float, default=4.5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--corpus", type=Path, help="A corpus directory by the warm start's vocabulary.")
    parser.add_argument("--rows", choices=("auto", "padded", "packed", "unpadded"), default="auto")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options.model, options.minutes, options.threads, options.corpus, options.rows)
    if options.model in TARGETS:
        save_result("pretraining", options.model, result)
    if options.json:
        print(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    main()
