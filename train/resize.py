"""A checkpoint's vocabulary made to fit the corpus's: the same pieces, perhaps with more after them."""

from pathlib import Path

import torch

from bertship.errors import InputError
from bertship.tokenization import Tokenizer
from train.heads import MaskedLanguageModel

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
