"""Small BERTs with random weights, tasks of each head and texts for them: what the tests of export share."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bertship.artifacts import write_manifest
from bertship.config import EncoderConfig
from bertship.tasks import TASKS, Example, Task
from bertship.tasks.ner import Entity, split_words
from bertship.tasks.squad import Gold
from bertship.tokenization import SPECIAL_TOKENS, Tokenizer
from train.checkpoint import save_model
from train.heads import HEADS, HeadedModel

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TOKENIZER = Tokenizer.from_vocab([*SPECIAL_TOKENS, *LETTERS, *(f"##{c}" for c in LETTERS), "."], lowercase=True)
CONFIG = EncoderConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=512,
    initializer_range=0.2,
)
TASKS_BY_HEAD = {
    "sentence": Task("moods", "sentence", labels=("bad", "good", "odd"), metrics=("accuracy",), max_tokens=32),
    "span": Task(
        "finder", "span", metrics=("f1",), max_tokens=48, overlap=8, options={**TASKS["squad"].options, "top_k": 2}
    ),
    "token": Task("marks", "token", labels=("O", "B-X", "I-X"), metrics=("f1",), max_tokens=32, overlap=8),
}

# what trains: a regression has the head of "sentence", with one output
TRAINED_TASKS = TASKS_BY_HEAD | {"value": Task("grades", "single_regression", metrics=("pearson",), max_tokens=32)}


def make_model(head: str, config: EncoderConfig = CONFIG) -> HeadedModel:
    """Every tensor random, biases and LayerNorm too: zeros and ones would hide an exchange of two of them."""
    torch.manual_seed(7)
    task = TRAINED_TASKS[head]
    model = HEADS[task.behaviour.head](config, task.behaviour.width(task)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def make_examples(head: str, count: int = 40) -> list[Example]:
    """Labelled texts of mixed lengths, some longer than the task's rows; the labels mean nothing."""
    rng = random.Random(3)

    def text(words: int) -> str:
        return " ".join("".join(rng.choices(LETTERS, k=rng.randint(1, 4))) for _ in range(words))

    def sentence(i: int) -> Example:
        return Example({"TEXT": text(1 + i % 13)}, rng.choice(TASKS_BY_HEAD["sentence"].labels), f"text {i}")

    def value(i: int) -> Example:
        return Example({"TEXT": text(1 + i % 13)}, f"{10 + 20 * rng.random():.2f}", f"text {i}")

    def span(i: int) -> Example:
        context = text(4 + i % 30)
        return Example(
            {"QUESTION": text(1 + i % 4), "CONTEXT": context}, Gold(str(i), ((context.split()[0], 0),)), f"text {i}"
        )

    def token(i: int) -> Example:
        words = text(1 + i % 17)
        places = split_words(words)
        return Example({"TEXT": words, "WORDS": places}, [Entity("X", *places[0])], f"text {i}")

    makers: dict[str, Callable[[int], Example]] = {"sentence": sentence, "value": value, "span": span, "token": token}
    return [makers[head](i) for i in range(count)]


def make_run(run: Path, head: str, change: Callable[[Any], None] = lambda model: None) -> Path:
    """A fine-tuning run as `train.finetune` leaves it; `change` edits the model first."""
    task, model = TASKS_BY_HEAD[head], make_model(head)
    with torch.no_grad():
        change(model)
    (run / "model").mkdir(parents=True)
    save_model(model, TOKENIZER, run / "model", task.labels)
    (run / "task.json").write_text(task.to_json(), encoding="utf-8")
    write_manifest(run, "finetune", task=task.name)
    return run
