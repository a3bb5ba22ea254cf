"""Pre-training samples: pure functions of (seed, epoch, index), balanced pairs, no segment of its own document."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertship.config import CorpusConfig, PretrainConfig
from bertship.errors import InputError
from bertship.tokenization import SPECIAL_TOKENS, Tokenizer
from train.corpus import Corpus, build_corpus
from train.dataset import PretrainingDataset
from train.heads import IS_NEXT, NOT_NEXT

DATA = Path(__file__).parents[2] / "shared" / "data" / "corpus"
TOKENIZER = Tokenizer.from_vocab([*SPECIAL_TOKENS, *(f"w{index}" for index in range(995))], lowercase=True)
CONFIG = PretrainConfig(sequence_length=32, seed=3)


def corpus_of(documents: list[list[int]]) -> Corpus:
    """A corpus of documents given as lengths of their sentences; token i of the corpus has the id 5 + i % 995."""
    lengths = [length for document in documents for length in document]
    return Corpus(
        5 + np.arange(sum(lengths)) % 995,
        np.concatenate([[0], np.cumsum(lengths)]),
        np.concatenate([[0], np.cumsum([len(document) for document in documents])]),
    )


def ordinary(documents: int = 80) -> Corpus:
    rng = np.random.default_rng(1)
    return corpus_of([rng.integers(1, 30, rng.integers(1, 25)).tolist() for _ in range(documents)])


def dataset_of(corpus: Corpus, **changes: object) -> PretrainingDataset:
    config = CONFIG.model_copy(update=changes)
    return PretrainingDataset(corpus, config.sequence_length, config, TOKENIZER)


def test_labels_are_those_of_published_checkpoints() -> None:
    assert (IS_NEXT, NOT_NEXT) == (0, 1)


def test_rows_are_cls_a_sep_b_sep_and_labels_the_originals() -> None:
    corpus = ordinary()
    dataset = dataset_of(corpus)
    bounds = corpus.sentences[corpus.documents]
    for index in range(len(dataset)):
        sample = dataset.sample(index, epoch=0)
        a, b = (
            corpus.tokens[bounds[s.document] + s.start : bounds[s.document] + s.end]
            for s in (sample.first, sample.second)
        )
        assert len(a) and len(b)
        original = np.concatenate([[TOKENIZER.cls_id], a, [TOKENIZER.sep_id], b, [TOKENIZER.sep_id]])
        assert len(original) == len(sample.row) <= CONFIG.sequence_length
        assert (sample.labels == original[sample.positions]).all()
        assert len(sample.positions) >= 1
        restored = sample.row.ids.copy()
        restored[sample.positions] = sample.labels
        assert (restored == original).all()
        assert sample.row.types.tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1)
        if sample.next_label == IS_NEXT:
            assert (sample.first.document, sample.first.end) == (sample.second.document, sample.second.start)
        else:
            assert sample.first.document != sample.second.document


def test_batch_is_padded_to_its_longest_row_with_flat_positions() -> None:
    dataset = dataset_of(corpus_of([[3, 2], [9, 9, 9, 9], [2, 2], [14, 30]]))
    samples = [dataset.sample(index, 0) for index in range(len(dataset))]
    batch = dataset.batch(range(len(dataset)), 0)
    rows, longest = batch["input_ids"].shape
    assert (rows, longest) == (len(samples), max(len(sample.row) for sample in samples))
    assert all(array.dtype == np.int64 for array in batch.values())
    assert batch["attention_mask"].sum(1).tolist() == [len(sample.row) for sample in samples]
    assert (batch["input_ids"][batch["attention_mask"] == 0] == TOKENIZER.pad_id).all()
    row, column = np.divmod(batch["predicted_positions"], longest)
    assert (batch["attention_mask"][row, column] == 1).all()
    assert not np.isin(batch["mlm_labels"], TOKENIZER.special_ids).any()
    # places in the second segment count on through the inner [SEP]
    expected = np.concatenate([sample.positions for sample in samples])
    assert column.tolist() == expected.tolist()
    assert batch["nsp_labels"].tolist() == [sample.next_label for sample in samples]


def test_a_sample_depends_on_seed_epoch_and_index_alone() -> None:
    corpus = ordinary()
    one, two = dataset_of(corpus), dataset_of(corpus)
    forwards = {index: one.batch([index], 1) for index in range(40)}
    two.batch(range(30), 5)
    for index in reversed(range(40)):
        again = two.batch([index], 1)
        assert all((again[name] == forwards[index][name]).all() for name in again)
    for other in (dataset_of(corpus, seed=4).batch(range(8), 1), one.batch(range(8), 2)):
        this = one.batch(range(8), 1)
        assert this["input_ids"].shape != other["input_ids"].shape or (this["input_ids"] != other["input_ids"]).any()


def test_every_epoch_visits_every_sample_once_in_an_order_of_its_own() -> None:
    dataset = dataset_of(ordinary())
    orders = [dataset.order(epoch) for epoch in range(3)]
    assert all(sorted(order.tolist()) == list(range(len(dataset))) for order in orders)
    assert (orders[0] != orders[1]).any()
    assert dataset.order_hash() == dataset_of(ordinary()).order_hash() != dataset_of(ordinary(), seed=4).order_hash()
    assert len(dataset.order_hash(3)) == 64


def test_steps_run_through_the_epochs() -> None:
    dataset = dataset_of(corpus_of([[9, 9, 9], [9, 9], [5, 5]]))
    keys = [(epoch, int(index)) for epoch in range(9) for index in dataset.order(epoch)]
    for step in range(3):
        batch = dataset.batch_at(step, 5)
        expected = dataset.collate([dataset.sample(index, epoch) for epoch, index in keys[step * 5 : step * 5 + 5]])
        assert all((batch[name] == expected[name]).all() for name in batch)


@pytest.mark.parametrize(
    "documents",
    [
        lambda rng: rng.integers(1, 30, rng.integers(1, 25)).tolist(),
        lambda rng: [int(rng.integers(2, 40))],  # one sentence each
        lambda rng: [1] * int(rng.integers(2, 9)),
    ],
    ids=["ordinary", "one sentence", "one token a sentence"],
)
def test_half_of_the_pairs_are_next(documents: Callable[[np.random.Generator], list[int]]) -> None:
    rng = np.random.default_rng(0)
    dataset = dataset_of(corpus_of([documents(rng) for _ in range(200)]))
    for epoch in range(3):
        labels = dataset.batch(range(len(dataset)), epoch)["nsp_labels"]
        assert abs(labels.mean() - 0.5) < 0.01
    # and the label is not to be read off the index
    first = [dataset.sample(0, epoch).next_label for epoch in range(100)]
    assert 25 < sum(first) < 75


def test_one_document_gives_next_pairs_alone() -> None:
    dataset = dataset_of(corpus_of([[7] * 40]))
    assert (dataset.batch(range(len(dataset)), 0)["nsp_labels"] == IS_NEXT).all()


def test_a_document_of_one_token_is_a_random_segment_alone() -> None:
    dataset = dataset_of(corpus_of([[1], [20, 20]]))
    samples = [dataset.sample(index, epoch) for epoch in range(30) for index in range(len(dataset))]
    assert {sample.first.document for sample in samples} == {1}
    assert {sample.second.document for sample in samples} == {0, 1}
    with pytest.raises(InputError, match="none of the corpus's 2 documents has two tokens"):
        dataset_of(corpus_of([[1], [1]]))


@pytest.mark.parametrize("documents", [[[500]], [[6] * 60], [[40, 3, 90, 1, 1, 200]]], ids=["giant", "short", "mixed"])
def test_every_token_is_met_over_the_epochs(documents: list[list[int]]) -> None:
    dataset = dataset_of(corpus_of(documents))
    seen = np.zeros(sum(documents[0]), int)
    epochs = 60
    for epoch in range(epochs):
        for index in range(len(dataset)):
            sample = dataset.sample(index, epoch)
            seen[sample.first.start : sample.second.end] += 1
    assert seen.min() > 0
    assert 0.5 * epochs < seen.mean() < 1.5 * epochs


def test_the_tokens_used_are_the_tokens_there_are() -> None:
    """Documents of any length, from two tokens to two hundred rows: no epoch favours one, and none is cut short."""
    rng = np.random.default_rng(5)
    documents = [rng.integers(1, 40, count).tolist() for count in (2, 3, 5, 20, 100, 300) for _ in range(3)]
    corpus = corpus_of(documents)
    dataset = dataset_of(corpus)
    bounds = corpus.sentences[corpus.documents]
    seen = np.zeros(len(corpus.tokens), int)
    shares = []
    for epoch in range(24):
        for index in range(len(dataset)):
            sample = dataset.sample(index, epoch)
            for span in (sample.first, sample.second):
                seen[bounds[span.document] + span.start : bounds[span.document] + span.end] += 1
        shares.append((seen > 0).mean())
    assert shares[0] > 0.65 and shares[1] > 0.9 and shares[3] > 0.98
    assert shares[-1] == 1, "tokens that are never used"
    of_document = np.add.reduceat(seen, bounds[:-1]) / np.diff(bounds) / 24
    long = np.diff(bounds) > 200
    assert of_document[long].min() > 0.85 and of_document[long].max() < 1.15
    assert abs(of_document[long].mean() - 1) < 0.15


def test_a_pair_is_next_in_every_second_epoch() -> None:
    dataset = dataset_of(ordinary())
    for index in range(20):
        labels = [dataset.sample(index, epoch).next_label for epoch in range(10)]
        assert all(labels[epoch] != labels[epoch + 1] for epoch in range(0, 10, 2))


@pytest.mark.parametrize("name", ["austen", "wikipedia"])
def test_balance_on_real_documents(tmp_path: Path, name: str) -> None:
    """pre.2"""
    if not (DATA / f"{name}.jsonl").is_file():
        pytest.skip(f"no {DATA}")
    build_corpus([DATA / f"{name}.jsonl"], tmp_path / "out", CorpusConfig(vocab_size=1024), report=lambda _: None)
    tokenizer = Tokenizer.from_dir(tmp_path / "out")
    config = PretrainConfig(sequence_length=128, whole_word_masking=True)
    dataset = PretrainingDataset(Corpus.open(tmp_path / "out"), 128, config, tokenizer)
    samples = [dataset.sample(index, 0) for index in range(len(dataset))]
    assert abs(np.mean([sample.next_label for sample in samples]) - 0.5) < 0.02
    for sample in samples:
        assert len(sample.positions) >= 1
        assert sample.next_label == IS_NEXT or sample.first.document != sample.second.document
        assert not set(sample.row.ids[sample.positions].tolist()) & (set(tokenizer.special_ids) - {tokenizer.mask_id})
    predicted = sum(len(sample.positions) for sample in samples)
    assert abs(predicted / sum(len(sample.row) - 3 for sample in samples) - 0.15) < 0.005


@settings(max_examples=60, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=12), min_size=1, max_size=12),
    length=st.integers(8, 64),
    seed=st.integers(0, 9),
    whole_words=st.booleans(),
)
def test_any_corpus(documents: list[list[int]], length: int, seed: int, whole_words: bool) -> None:
    """pre.1, pre.4, pre.5: whatever the documents, every sample is whole, predicts something, and is what it says."""
    corpus = corpus_of(documents)
    if all(sum(document) < 2 for document in documents):
        return
    config = CONFIG.model_copy(update={"seed": seed, "sequence_length": length, "whole_word_masking": whole_words})
    dataset = PretrainingDataset(corpus, length, config, TOKENIZER)
    special = {TOKENIZER.cls_id, TOKENIZER.sep_id, TOKENIZER.pad_id}
    labels = []
    for index in range(len(dataset)):
        sample = dataset.sample(index, seed)
        labels.append(sample.next_label)
        assert 5 <= len(sample.row) <= length
        assert (sample.row.ids == TOKENIZER.sep_id).sum() == 2 and sample.row.ids[0] == TOKENIZER.cls_id
        assert len(sample.positions) >= 1 and not set(sample.labels.tolist()) & set(TOKENIZER.special_ids)
        assert not special & set(sample.row.ids[sample.positions].tolist())
        assert 0 <= sample.first.start < sample.first.end <= sum(documents[sample.first.document])
        assert 0 <= sample.second.start < sample.second.end <= sum(documents[sample.second.document])
        follows = (sample.first.document, sample.first.end) == (sample.second.document, sample.second.start)
        assert follows if sample.next_label == IS_NEXT else sample.first.document != sample.second.document
        if len(documents) == 1:
            assert sample.next_label == IS_NEXT
    if len(documents) > 1:
        assert abs(labels.count(NOT_NEXT) - labels.count(IS_NEXT)) <= 1


def test_threads_see_what_one_sees() -> None:
    """pre.7"""
    dataset = dataset_of(ordinary())
    alone = [dataset.batch_at(step, 8) for step in range(12)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda step: dataset.batch_at(step, 8), range(12)))
    for one, other in zip(alone, together, strict=True):
        assert all((one[name] == other[name]).all() for name in one)


def test_a_single_sentence_is_all_segment_a() -> None:
    row = TOKENIZER.row(TOKENIZER.tokenize(["w1 w2 w3"])[0])
    assert row.types.tolist() == [0] * 5
    assert row.ids.tolist()[0] == TOKENIZER.cls_id and row.ids.tolist()[-1] == TOKENIZER.sep_id


def test_segments_start_at_sentences_and_fill_the_row() -> None:
    corpus = corpus_of([[6] * 60 for _ in range(20)])
    samples = [dataset_of(corpus, short_sequence_share=0.0).sample(index, 0) for index in range(200)]
    assert all(span.start % 6 == 0 for sample in samples for span in (sample.first, sample.second))
    lengths = np.array([len(sample.row) for sample in samples])
    assert (lengths == CONFIG.sequence_length).mean() > 0.9
    assert lengths.min() > CONFIG.sequence_length * 0.7
    short = [len(dataset_of(corpus, short_sequence_share=1.0).sample(index, 0).row) for index in range(200)]
    assert min(short) < 10 < 24 < max(short)


def test_mask_rates_are_checked() -> None:
    with pytest.raises(InputError, match="mask_rates"):
        dataset_of(ordinary(), mask_rates=(0.8, 0.8, 0.1))
