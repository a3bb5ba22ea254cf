"""The model that a pre-training begins with: random, or a checkpoint whose vocabulary is made to fit the corpus's."""

from collections.abc import Callable
from pathlib import Path

import torch

from bertship.config import EncoderConfig
from bertship.errors import InputError
from bertship.tokenization import Tokenizer
from train.batches import Phase
from train.checkpoint import check_vocabulary, load_model
from train.heads import MaskedLanguageModel
from train.objectives import Objective

ROWS = 8  # the embedding's rows become a multiple of it, which matrix products like


def check_same_pieces(corpus: Tokenizer, start: Tokenizer, corpus_dir: Path, start_dir: Path) -> int:
    """The number of pieces that the corpus's vocabulary has: the checkpoint's, and perhaps more after them.

    Raises InputError where it is another vocabulary or reads text in another way: its ids would mean other pieces.
    """
    ours, theirs = (tokenizer.backend.get_vocab(with_added_tokens=True) for tokenizer in (corpus, start))
    different = next((piece for piece, index in sorted(theirs.items()) if ours.get(piece) != index), None)
    remedy = f"make the corpus with the tokenizer of {start_dir}, or with that and pieces of yours after its own"
    if different is not None:
        raise InputError(
            f"{corpus_dir} has another vocabulary than {start_dir}: {different!r} is number {theirs[different]} there, "
            f"here {ours.get(different, 'missing')}; {remedy}"
        )
    if corpus.lowercase != start.lowercase:
        raise InputError(f"{corpus_dir} and {start_dir} differ in lowercasing; {remedy}")
    return corpus.vocab_size


def resize_vocabulary(model: MaskedLanguageModel, pieces: int) -> MaskedLanguageModel:
    """`model`, or where its embedding has fewer rows than `pieces`, a model like it with enough, a multiple of ROWS.

    New rows are drawn around the mean of the old ones with their deviation, unit by unit, so that a new piece begins
    as an average one and not as the most or least likely (Hewitt 2021). Seed torch for repeatable ones.
    """
    old = model.config.vocab_size
    if pieces <= old:
        return model
    rows = -(-pieces // ROWS) * ROWS
    grown = type(model)(model.config.model_copy(update={"vocab_size": rows}), model.num_labels)
    state = model.state_dict()
    words, bias = state["encoder.embeddings.word.weight"], state["mlm.bias"]
    new_words = torch.normal(words.mean(0).expand(rows - old, -1), words.std(0).expand(rows - old, -1))
    state["encoder.embeddings.word.weight"] = torch.cat([words, new_words])
    state["mlm.bias"] = torch.cat([bias, bias.mean().expand(rows - old)])
    grown.load_state_dict(state)
    return grown


def start_model(
    objective: Objective,
    model_config: EncoderConfig | None,
    init: Path | None,
    corpus_dir: Path,
    tokenizer: Tokenizer,
    report: Callable[[str], None],
) -> MaskedLanguageModel:
    """The model that a training begins with: random by `model_config`, or from the model directory `init`.

    `report` is told what of `init` was missing and left over. Raises InputError where `init` has another vocabulary
    than the corpus or reads in the other direction.
    """
    if init is None:
        assert model_config is not None
        return objective.model(model_config.model_copy(update={"is_decoder": objective.causal}))
    model, found = load_model(objective.model, init)
    report(f"{init}: {found.describe()}")
    if model.config.is_decoder != objective.causal:
        direction = "from left to right" if model.config.is_decoder else "in both directions"
        raise InputError(f"{init} reads {direction} (is_decoder), the objective does not; take another one")
    pieces = check_same_pieces(tokenizer, Tokenizer.from_dir(init), corpus_dir, init)
    grown = resize_vocabulary(model, pieces)
    if grown is not model:
        report(f"{init}: vocabulary grown from {model.config.vocab_size:,} rows to {grown.config.vocab_size:,}")
    return grown


def check_fit(config: EncoderConfig, tokenizer: Tokenizer, phases: list[Phase], corpus_dir: Path) -> None:
    """Refuse a corpus whose pieces, and phases whose sequences, the model has no vectors for: InputError."""
    check_vocabulary(tokenizer, config, str(corpus_dir))
    if config.type_vocab_size < 2:
        raise InputError(f"the model has type_vocab_size {config.type_vocab_size}; a pair of segments needs 2")
    for phase in phases:
        if phase.sequence_length > config.max_position_embeddings:
            raise InputError(
                f"sequence_length {phase.sequence_length} is above the model's max_position_embeddings "
                f"{config.max_position_embeddings}"
            )
