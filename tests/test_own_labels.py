"""docs/own-labels.md, by its own words: a classification, a regression and a NER set from files to served answers."""

import json
import random
import re
from pathlib import Path

import pytest
from conftest import BAD, GOOD, NAMES, PLACES, SETTINGS

from bertship.client import Client
from serving import environment
from serving.repository import ready_models
from serving.server import TritonServer

DOCS = Path(__file__).parents[1] / "docs" / "own-labels.md"
TASKS_OF_DOCS = {
    text.split("\n")[0][2:]: text for text in re.findall(r"```toml\n(# \w+\.toml\n.*?)```", DOCS.read_text(), re.S)
}


def write(folder: Path, count: int, split: str) -> None:
    rng = random.Random(split)
    tickets, stars, parts = ["label,message"], [], []
    for _ in range(count):
        good = rng.random() < 0.5
        tickets.append(f'{"billing" if good else "other"},"It is {rng.choice(GOOD if good else BAD)}, here"')
        stars.append({"review": f"a {rng.choice(GOOD if good else BAD)} film", "stars": 4 + good if good else 1.5})
        name, place = rng.choice(NAMES), rng.choice(PLACES)
        text = f"{name} went to the {place}."
        at = text.index(place)
        parts.append({"text": text, "entities": [{"label": "part", "start": at, "end": at + len(place)}]})
    for name, lines in (
        ("tickets", tickets),
        ("stars", [json.dumps(row) for row in stars]),
        ("parts", [json.dumps(row) for row in parts]),
    ):
        (folder / name).mkdir(exist_ok=True)
        suffix = "csv" if name == "tickets" else "jsonl"
        (folder / name / f"{split}.{suffix}").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture(scope="module")
def served(tmp_path_factory, bertship, warm_start):
    home = tmp_path_factory.mktemp("own")
    write(home, 160, "train")
    write(home, 40, "dev")
    runs, repository = home / "runs", home / "model_repository"
    for file, text in TASKS_OF_DOCS.items():
        (home / file).write_text(text, encoding="utf-8")
        name = file.removesuffix(".toml")
        common = ("--task", home / file, "--runs", runs)
        code, _, err = bertship("finetune", *common, "--data", home / name, "--init", warm_start, *SETTINGS)
        assert code == 0, err
        code, _, err = bertship("export", *common, "--precision", "fp32")
        assert code == 0, err
        code, _, err = bertship("repository", *common, "--repository", repository)
        assert code == 0, err
    with TritonServer(environment.prepare()) as server:
        log = home / "triton.log"
        ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
        server.start(repository, models=ready_models(repository), log_path=log, **ports)
        yield server.http_url, home


def test_the_docs_name_three_sets():
    assert set(TASKS_OF_DOCS) == {"tickets.toml", "stars.toml", "parts.toml"}


def test_the_docs_sets_are_served(served):
    url, _ = served
    with Client(url) as client:
        assert client.ask("tickets", TEXT="It is lovely, here")["LABEL"] == "billing"
        assert client.ask("tickets", TEXT="It is harsh, here")["LABEL"] == "other"
        good, bad = (client.ask("stars", TEXT=f"a {word} film")["SCORE"] for word in ("lovely", "harsh"))
        assert good > bad + 1
        text = "Anna went to the castle."
        assert [(e["label"], e["text"]) for e in client.ask("parts", TEXT=text)["ENTITIES"]] == [("part", "castle")]


@pytest.mark.parametrize("name", ["tickets", "stars", "parts"])
def test_the_docs_check_command(served, bertship, name):
    _, home = served
    code, out, err = bertship("task", "check", home / f"{name}.toml", home / name)
    # the made-up texts repeat themselves, across the splits too: that is what it says
    assert code == 1 and "in the training split too" in out, err
    assert "train: 160 rows" in out and "dev: 40 rows" in out
