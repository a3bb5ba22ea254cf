"""What several test modules share: a tiny warm start, tiny data in official layouts, and a run of the command line."""

import contextlib
import csv
import io
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bertship import cli

PLACES = ("garden", "kitchen", "river", "market", "castle", "forest")
NAMES = ("Anna", "Bruno", "Clara", "Dario", "Elena", "Felix")
GOOD = ("bright", "lovely", "warm", "gentle")
BAD = ("dull", "awful", "cold", "harsh")


@pytest.fixture(scope="session")
def bertship() -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        before, code = sys.argv, 0
        sys.argv = ["bertship", *map(str, arguments)]
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                cli.main()
        except SystemExit as leave:
            code = int(leave.code or 0)
        finally:
            sys.argv = before
        return code, out.getvalue(), err.getvalue()

    return run


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder a task with small files in its official layout, learnable by a tiny model."""
    root = tmp_path_factory.mktemp("data")
    for split, count, seed in (("train", 240, 1), ("dev", 40, 2)):
        rng = random.Random(seed)
        _table(root / "sst2" / f"{split}.tsv", ["sentence", "label"], [_review(rng) for _ in range(count)])
        _csv(root / "weather" / f"{split}.csv", ["day", "message"], [_weather(rng) for _ in range(count)])
        header = [*(f"other{i}" for i in range(7)), "sentence1", "sentence2", "score"]
        _table(root / "stsb" / f"{split}.tsv", header, [["0"] * 7 + _similar(rng) for _ in range(count)])
        name = {"train": "train.tsv", "dev": "dev_matched.tsv"}[split]
        _table(root / "mnli" / name, ["sentence1", "sentence2", "gold_label"], [_entails(rng) for _ in range(count)])
        _write(root / "squad" / f"{split}.json", json.dumps({"version": "1.1", "data": [_article(rng, count)]}))
        _write(root / "ner" / f"{split}.conll", "\n".join(_tagged(rng) for _ in range(count)))
    return root


@pytest.fixture(scope="session")
def warm_start(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """A BERT of 2 layers of 64 with random weights and a vocabulary of the data's words."""
    import torch

    from bertship.config import EncoderConfig
    from train.checkpoint import save_model
    from train.heads import PretrainingModel
    from train.vocabulary import train_vocabulary

    texts = [path.read_text(encoding="utf-8") for path in sorted(data.rglob("train*"))]
    tokenizer = train_vocabulary(texts, 256, lowercase=True)
    torch.manual_seed(0)
    config = EncoderConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=512,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    folder = tmp_path_factory.mktemp("warm-start")
    save_model(PretrainingModel(config), tokenizer, folder)
    return folder


def _review(rng: random.Random) -> list[str]:
    good = rng.random() < 0.5
    return [f"a {rng.choice(GOOD if good else BAD)} film about the {rng.choice(PLACES)}", "1" if good else "0"]


def _weather(rng: random.Random) -> list[Any]:
    good = rng.random() < 0.5
    return ["fair" if good else "foul", f'It is {rng.choice(GOOD if good else BAD)}, "in the {rng.choice(PLACES)}"']


def _similar(rng: random.Random) -> list[str]:
    word = rng.choice(GOOD + BAD)
    return ["a lovely day", f"a {word} day", f"{len(word) / 2 if word in GOOD else 0.5}"]


def _entails(rng: random.Random) -> list[str]:
    word = rng.choice(GOOD + BAD)
    label = "entailment" if word in GOOD[:2] else "neutral" if word in GOOD else "contradiction"
    return [f"{rng.choice(NAMES)} is here", f"it is {word}", label]


def _article(rng: random.Random, count: int) -> dict[str, Any]:
    paragraphs = []
    for number in range(count):
        name, place = rng.choice(NAMES), rng.choice(PLACES)
        context = f"{name} went to the {place} today. It was {rng.choice(GOOD)} there."
        answer = {"text": place, "answer_start": context.index(place)}
        question = {"id": f"q{number}", "question": f"Where did {name} go?", "answers": [answer]}
        paragraphs.append({"context": context, "qas": [question]})
    return {"title": "places", "paragraphs": paragraphs}


def _tagged(rng: random.Random) -> str:
    rows = []
    for _ in range(rng.randint(1, 20)):  # to the window's end, so that late positions are learnt too
        if rng.random() < 0.5:
            rows += [(rng.choice(NAMES), "B-person"), ("went", "O"), ("to", "O")]
            rows += [("Old", "B-place"), (rng.choice(PLACES), "I-place"), (".", "O")]
        else:
            rows += [(word, "O") for word in ("It", "was", rng.choice(GOOD), "there", ".")]
    return "".join(f"{word}\t{tag}\n" for word, tag in rows)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _table(path: Path, header: list[str], rows: list[list[str]]) -> None:
    _write(path, "".join("\t".join(row) + "\n" for row in [header, *rows]))


def _csv(path: Path, header: list[str], rows: list[list[Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header, *rows])
