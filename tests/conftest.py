"""What several test modules share: tiny data in official layouts, a tiny warm start, and the whole line run on them."""

import contextlib
import csv
import io
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from bertship import cli
from serving import environment
from serving.repository import ready_models
from serving.server import TritonServer

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests give their data, or want the sample
# messages name `bertship` as the reader can start it: here by its name, as in an activated environment
os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
# run in the background of a script, tests would ignore Ctrl-C, and so would every process that they start
signal.signal(signal.SIGINT, signal.default_int_handler)

PLACES = ("garden", "kitchen", "river", "market", "castle", "forest")
NAMES = ("Anna", "Bruno", "Clara", "Dario", "Elena", "Felix")
GOOD = ("bright", "lovely", "warm", "gentle")
BAD = ("dull", "awful", "cold", "harsh")

SETTINGS = ("--set", "epochs=15", "--set", "learning_rate=2e-3", "--set", "batch_size=16", "--set", "precision=fp32")
OWN_TASK = """
name = "weather"
kind = "sentence"
metrics = ["accuracy", "f1"]

[files]
format = "csv"
target = "day"
columns = { TEXT = "message" }
"""
# what a model that has learnt the tiny data has to reach on its dev split
LEARNT = {
    "sst2": ("accuracy", 0.95),
    "weather": ("accuracy", 0.95),
    "mnli": ("accuracy", 0.8),
    "stsb": ("pearson", 0.5),
    "swag": ("accuracy", 0.9),
    "squad": ("f1", 0.9),
    "ner": ("f1", 0.9),
}


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
        endings = ["", "", "", "", "sent1", "sent2", "gold-source", *(f"ending{i}" for i in range(4)), "label"]
        name = {"train": "train.csv", "dev": "val.csv"}[split]
        _csv(root / "swag" / name, endings, [_goes_on(rng) for _ in range(count // 2)])
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


@dataclass
class Line:
    """What the commands left behind, and a server on it."""

    runs: Path
    repository: Path
    tasks: dict[str, str]  # a task's name: what --task takes
    server: TritonServer

    @property
    def urls(self) -> tuple[str, str]:
        return (self.server.http_url, f"grpc://{self.server.grpc_url}")


@pytest.fixture(scope="session")
def line(
    tmp_path_factory: pytest.TempPathFactory, data: Path, warm_start: Path, bertship: Callable[..., Any]
) -> Iterator[Line]:
    home = tmp_path_factory.mktemp("line")
    runs, repository = home / "runs", home / "model_repository"
    own = home / "weather.toml"
    own.write_text(OWN_TASK, encoding="utf-8")
    tasks = {name: name for name in LEARNT} | {"weather": str(own)}
    for name, task in tasks.items():
        common = ("--task", task, "--data", data / name, "--runs", runs)
        code, out, err = bertship("--json", "finetune", *common, "--init", warm_start, *SETTINGS)
        assert code == 0, err
        metric, least = LEARNT[name]
        assert json.loads(out)["metrics"][metric] >= least, (name, json.loads(out)["metrics"])
        precision = "auto" if name == "weather" else "fp32"
        code, _, err = bertship("export", *common, "--precision", precision)
        assert code == 0, err
        code, _, err = bertship("repository", "--task", task, "--runs", runs, "--repository", repository)
        assert code == 0, err
    with TritonServer(environment.prepare()) as server:
        server.start(
            repository,
            models=ready_models(repository),
            log_path=home / "triton.log",
            http_port=0,
            grpc_port=0,
            metrics_port=0,
        )
        yield Line(runs, repository, tasks, server)
        pid, prefix, ports = server.pid, server.shm_prefix, (server.http_port, server.grpc_port, server.metrics_port)
    assert not psutil.pid_exists(pid)
    assert not list(Path("/dev/shm").glob(f"{prefix}*"))
    assert not {c.laddr.port for c in psutil.net_connections() if c.status == psutil.CONN_LISTEN} & set(ports)


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


def _goes_on(rng: random.Random) -> list[Any]:
    endings = [rng.choice(GOOD), *rng.sample(BAD, 3)]
    order = rng.sample(range(4), 4)
    made = [f"was {endings[i]} in the {rng.choice(PLACES)}" for i in order]
    return ["0"] * 4 + [f"{rng.choice(NAMES)} is here.", "It", "gold", *made, order.index(0)]


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
