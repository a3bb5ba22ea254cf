"""From the packaged warm start, on packaged text, next sentences are told from random ones. Minutes: slow."""

from pathlib import Path

import pytest

from bertship.errors import InputError
from train.corpus import build_corpus
from train.sources import fetch
from train.stages import make_pretraining

SETTINGS = {
    "steps": 600,
    "batch_size": 32,
    "sequence_length": 64,
    "learning_rate": 5e-4,
    "warmup_steps": 60,
    "heldout_batches": 30,
    "checkpoint_every": 100,
}


@pytest.mark.slow
def test_next_sentences_are_told_from_random_ones(tmp_path: Path) -> None:
    from bertship.config import CorpusConfig
    from bertship.tokenization import Tokenizer

    try:
        start, text = fetch("minilm", print), fetch("wikipedia", print) / "wikipedia.xml.bz2"
    except InputError as error:
        pytest.skip(f"packages cannot be fetched here: {error}")
    build_corpus([text], tmp_path / "corpus", CorpusConfig(), Tokenizer.from_dir(start), report=print)
    manifest = make_pretraining(
        tmp_path / "corpus", tmp_path / "pretrain" / "run", "tiny", SETTINGS, print, init="minilm"
    )
    before, after = manifest["metrics"]["before"], manifest["metrics"]["after"]
    print(before, after)
    # of 960 pairs: chance is within 0.5 +- 0.05 with three standard deviations
    assert abs(after["is_next_share"] - 0.5) < 0.05
    assert before["nsp_accuracy"] < 0.6, "a fresh head knows nothing"
    assert after["nsp_accuracy"] > 0.7
    assert after["mlm_loss"] < 0.9 * before["mlm_loss"]
