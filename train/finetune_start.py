"""The model that a fine-tuning begins with: a checkpoint that fits the task, its head in the task's order of labels."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bertship.errors import InputError
from bertship.tasks import Example, Task
from bertship.tokenization import Tokenizer
from train.checkpoint import LoadReport, check_vocabulary, labels_of, load_model
from train.features import model_class
from train.heads import HeadedModel
from train.model import init_weights
from train.value_scale import start_at_the_mean, value_head

Report = Callable[[str], None]


def start_model(task: Task, init: Path, tokenizer: Tokenizer, train: Sequence[Example], report: Report) -> HeadedModel:
    """The warm start `init` with the head of `task`; seed torch, as a new head is drawn.

    A new head of a regression starts at the mean of the values of `train` (`train.value_scale`).

    Raises InputError where vocabulary, casing or length do not fit.
    """
    model: HeadedModel
    model, loaded = load_model(model_class(task), init, task.behaviour.width(task))
    report(loaded.describe())
    check_vocabulary(tokenizer, model.config, str(init))
    check_casing(tokenizer, str(init))
    if task.max_tokens > model.config.max_position_embeddings:
        raise InputError(
            f"task {task.name} uses {task.max_tokens} tokens, {init} has positions for "
            f"{model.config.max_position_embeddings}; lower max_tokens or take another INIT"
        )
    _order_labels(model, loaded, task, init, report)
    if task.behaviour.loss == "mean_squared_error" and _fresh(loaded):
        start_at_the_mean(value_head(model), [float(example.target) for example in train])
    return model


def check_casing(tokenizer: Tokenizer, where: str) -> None:
    """Refuse a tokenizer that lowercases beside a cased vocabulary, where every capital would be lost: InputError.

    A vocabulary counts as cased where one in a hundred of its pieces has a capital letter, special tokens apart.
    """
    pieces = [piece for piece in tokenizer.backend.get_vocab(with_added_tokens=True) if not piece.startswith("[")]
    capitals = sum(piece != piece.lower() for piece in pieces)
    if tokenizer.lowercase and capitals > len(pieces) / 100:
        raise InputError(
            f"{where}: the tokenizer lowercases, and {capitals:,} of the vocabulary's {len(pieces):,} pieces have "
            "capitals; take the tokenizer's files from the checkpoint itself (do_lower_case in tokenizer_config.json)"
        )


def _fresh(loaded: LoadReport) -> bool:
    """Whether the head of labels or values starts afresh."""
    return any(name.startswith("classifier") for name in loaded.fresh)


def _order_labels(model: HeadedModel, loaded: LoadReport, task: Task, init: Path, report: Report) -> None:
    """A checkpoint's head has its own order of labels: put it into the task's, or start afresh with other labels."""
    classifier = getattr(model, "classifier", None)
    if not task.labels or classifier is None or _fresh(loaded):
        return
    names = labels_of(init)
    if names == task.labels:
        return
    if sorted(names) == sorted(task.labels):
        order = [names.index(label) for label in task.labels]
        with torch.no_grad():
            classifier.weight.copy_(classifier.weight[order].clone())
            classifier.bias.copy_(classifier.bias[order].clone())
        report(f"the head of {init} has its labels in the order {', '.join(names)}: put into that of {task.name}")
        return
    init_weights(classifier, model.config.initializer_range)
    report(f"the head of {init} has other labels ({', '.join(names) or 'unnamed'}): the new one starts afresh")
