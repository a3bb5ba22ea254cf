"""bertship/tokenization.py: user text is plain text, casing belongs to the checkpoint, offsets are code points."""

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from bertship.errors import InputError
from bertship.tokenization import SPECIAL_TOKENS, Row, Tokenizer, Tokens, pad, read_vocab, windows

TEXTS = json.loads((Path(__file__).parent / "golden" / "texts.json").read_text("utf-8"))
# every character and a few longer pieces, so that each text is cut finely and little is unknown
LETTERS = sorted({c for text in TEXTS for c in text + text.lower() if not c.isspace()})
PIECES = [*SPECIAL_TOKENS, *LETTERS, *("##" + c for c in LETTERS), "[unused1]", "mask", "sep", "MASK", "naïve", "##afe"]
PIECES = list(dict.fromkeys(PIECES))


def pieces(tokenizer, text):
    return [tokenizer.backend.id_to_token(i) for i in tokenizer.tokenize([text])[0].ids]


@pytest.fixture(scope="module", params=[True, False], ids=["uncased", "cased"])
def tokenizer(request):
    return Tokenizer.from_vocab(PIECES, lowercase=request.param)


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_special_tokens_in_text_are_text(tokenizer, token):
    """tok.1"""
    word = token[1:-1].lower() if tokenizer.lowercase else token[1:-1]
    found = pieces(tokenizer, f"a {token} b")
    assert (found[:2], found[-2:]) == (["a", "["], ["]", "b"])
    assert "".join(piece.removeprefix("##") for piece in found) == f"a[{word}]b"
    row = tokenizer.row(*tokenizer.tokenize([token, f"x{token}{token}"]))
    inner = [i for i in row.ids if i in tokenizer.special_ids]
    assert inner == [tokenizer.cls_id, tokenizer.sep_id, tokenizer.sep_id]


def test_accents_go_with_lowercasing_alone(tokenizer):
    """tok.2"""
    assert pieces(tokenizer, "naïve") == (["n", "##a", "##i", "##v", "##e"] if tokenizer.lowercase else ["naïve"])


@pytest.mark.parametrize("lowercase", [True, False])
def test_casing_that_contradicts_itself_is_refused(tmp_path, lowercase):
    """tok.3"""
    Tokenizer.from_vocab(PIECES, lowercase).save(tmp_path)
    assert Tokenizer.from_dir(tmp_path).lowercase is lowercase
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({"do_lower_case": not lowercase}))
    with pytest.raises(InputError, match=f"do_lower_case={not lowercase}, tokenizer.json lowercases: {lowercase}"):
        Tokenizer.from_dir(tmp_path)
    settings.write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    settings.write_text(json.dumps({"do_lower_case": lowercase}))
    assert Tokenizer.from_dir(tmp_path).lowercase is lowercase
    settings.unlink()
    assert Tokenizer.from_dir(tmp_path).lowercase is True  # as BertTokenizer takes it
    (tmp_path / "vocab.txt").unlink()
    with pytest.raises(InputError, match=r"neither tokenizer.json nor vocab.txt"):
        Tokenizer.from_dir(tmp_path)


def test_lowercasing_is_seen_inside_a_sequence_of_normalizers():
    backend = Tokenizer.from_vocab(PIECES, lowercase=False).backend
    normal = tokenizers.normalizers
    backend.normalizer = normal.Sequence([normal.NFD(), normal.Lowercase(), normal.StripAccents()])
    assert Tokenizer(backend).lowercase is True


ODD = ["a", "\u2028", "b\u0085c", "", "##\u2029", "\x0b", "d"]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_vocabulary_lines_end_at_newline_alone(tmp_path, end):
    """tok.4"""
    path = tmp_path / "vocab.txt"
    path.write_bytes("".join(piece + end for piece in [*SPECIAL_TOKENS, *ODD]).encode())
    assert read_vocab(path) == [*SPECIAL_TOKENS, *ODD]
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert [tokenizer.backend.token_to_id(piece) for piece in ODD] == list(range(5, 12))
    tokenizer.save(tmp_path)
    assert read_vocab(path) == [*SPECIAL_TOKENS, *ODD]


def test_a_piece_that_stands_twice_moves_no_id(tmp_path):
    lines = [*SPECIAL_TOKENS, "", "a", "", "b"]
    tokenizer = Tokenizer.from_vocab(lines, lowercase=True)
    assert tokenizer.vocab_size == len(lines)
    tokenizer.save(tmp_path)
    assert read_vocab(tmp_path / "vocab.txt") == lines
    assert tokenizer.tokenize(["a b"])[0].ids.tolist() == [6, 8]


def test_vocabulary_faults(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_vocab(tmp_path / "vocab.txt")
    (tmp_path / "vocab.txt").write_bytes(b"a\n\xff\n")
    with pytest.raises(InputError, match="not UTF-8 at byte 2"):
        read_vocab(tmp_path / "vocab.txt")


def test_sixteen_threads_agree_with_one(tokenizer):
    """tok.5"""
    expected = [tokens.ids.tolist() for tokens in tokenizer.tokenize(TEXTS)]

    def hammer(_):
        one_by_one = [tokenizer.tokenize([text])[0].ids.tolist() for text in TEXTS]
        return one_by_one == expected == [tokens.ids.tolist() for tokens in tokenizer.tokenize(TEXTS)]

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(hammer, range(64)))


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("a 👍🏽 b", ["a", "👍🏽", "b"]),
        ("日本x", ["日", "本", "x"]),
        ("שלום עולם", ["שלום", "עולם"]),
        ("cafe\u0301 x", ["cafe\u0301", "x"]),  # the accent is stripped, and still belongs to the answer
        ("e\u0301e\u0301\u0302", ["e\u0301e\u0301\u0302"]),
        ("שָׁלוֹם", ["שָׁלוֹם"]),
        ("❤\ufe0f!", ["❤\ufe0f", "!"]),
        ("a\u200bb c\u0000", ["a\u200bb", "c"]),
        ("İx y", ["İx", "y"]),
        ("한국", ["한국"]),
    ],
)
def test_offsets_are_code_points(tokenizer, text, places):
    """tok.7"""
    tokens = tokenizer.tokenize([text])[0]
    words, reach = [], -1
    for i, (start, end) in enumerate(tokens.offsets.tolist()):
        assert 0 <= start < end <= len(text)
        if i and tokenizer.backend.id_to_token(tokens.ids[i]).startswith("##"):
            words[-1] = (words[-1][0], max(words[-1][1], end))
        else:
            assert start >= reach
            words.append((start, end))
        reach = max(reach, end)
    assert [text[start:end] for start, end in words] == places


@given(st.text(max_size=40))
def test_offsets_ascend_and_stay_in_the_text(text):
    for lowercase in (True, False):
        offsets = CACHED[lowercase].tokenize([text])[0].offsets
        assert (offsets[:, 0] < offsets[:, 1]).all() and (np.diff(offsets, axis=0) >= 0).all()
        assert not len(offsets) or (offsets[0, 0] >= 0 and offsets[-1, 1] <= len(text))


CACHED = {lowercase: Tokenizer.from_vocab(PIECES, lowercase) for lowercase in (True, False)}


def test_files_that_are_no_bert_tokenizer_are_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(InputError, match="no such file"):
        Tokenizer.from_file(path)
    for content, message in (
        (tokenizers.Tokenizer(tokenizers.models.BPE()).to_str(), "is a BPE tokenizer; BERT's WordPiece"),
        ("{", "is no tokenizer"),
        (tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0, "[PAD]": 1})).to_str(), r"lacks .*\[CLS\], "),
    ):
        path.write_text(content)
        with pytest.raises(InputError, match=message) as caught:
            Tokenizer.from_file(path)
        assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_padding_and_truncation_in_a_file_are_ignored(tmp_path):
    source = Tokenizer.from_vocab(PIECES, lowercase=True)
    expected = source.tokenize(["a b c d e f", "a"])
    source.backend.enable_padding(length=32)
    source.backend.enable_truncation(4)
    source.backend.save(str(tmp_path / "tokenizer.json"))
    for ours, theirs in zip(Tokenizer.from_dir(tmp_path).tokenize(["a b c d e f", "a"]), expected, strict=True):
        assert ours.ids.tolist() == theirs.ids.tolist()


def test_transformers_loads_what_is_saved_and_agrees(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path, max_tokens=128)
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert auto.model_max_length == 128
    fast = transformers.BertTokenizerFast(vocab=str(tmp_path / "vocab.txt"), do_lower_case=tokenizer.lowercase)
    texts = [text for text in TEXTS if "[MASK]" not in text]  # there transformers sees special tokens
    for peer in (auto, fast):
        for text, second in zip(texts, texts[1:] + texts[:1], strict=True):
            second = second or "x"  # transformers takes an empty second text for none
            single, pair = peer(text), peer(text, second)
            ours = tokenizer.tokenize([text, second])
            row = tokenizer.row(ours[0])
            assert row.ids.tolist() == single["input_ids"], text
            row = tokenizer.row(*ours)
            assert (row.ids.tolist(), row.types.tolist()) == (pair["input_ids"], pair["token_type_ids"]), text


@pytest.mark.parametrize("accents", [None, False, True])
@pytest.mark.parametrize("chinese", [None, False, True])
def test_a_vocabulary_alone_is_read_as_its_configuration_says(accents, chinese, tmp_path):
    """Uncased models of German keep their accents by `strip_accents`; some have no tokenizer.json."""
    pieces_ = [*SPECIAL_TOKENS, "naive", "naïve", "中文", "中", "文", "##文"]
    (tmp_path / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces_), "utf-8")
    settings = {"do_lower_case": True, "strip_accents": accents, "tokenize_chinese_chars": chinese}
    settings = {name: value for name, value in settings.items() if value is not None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    got = pieces(Tokenizer.from_dir(tmp_path), "NAÏVE 中文")
    assert got == ["naïve" if accents is False else "naive", *(["中文"] if chinese is False else ["中", "文"])]


@pytest.mark.parametrize("bad", [{"strip_accents": "no"}, {"do_lower_case": 1}, {"tokenize_chinese_chars": []}])
def test_a_tokenizer_s_odd_configuration_is_one_line(bad, tmp_path):
    (tmp_path / "vocab.txt").write_text("".join(f"{piece}\n" for piece in PIECES), "utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(bad))
    with pytest.raises(InputError, match=rf"{next(iter(bad))} is .*, true or false is needed"):
        Tokenizer.from_dir(tmp_path)


def test_accents_kept_by_choice_survive_saving(tmp_path):
    transformers = pytest.importorskip("transformers")
    backend = Tokenizer.from_vocab(PIECES, lowercase=True).backend
    backend.normalizer = tokenizers.normalizers.BertNormalizer(strip_accents=False, lowercase=True)
    Tokenizer(backend).save(tmp_path)
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert auto.tokenize("NAÏVE") == pieces(Tokenizer.from_dir(tmp_path), "NAÏVE") == ["naïve"]


@given(st.integers(0, 400), st.integers(1, 60), st.data())
def test_windows(length, size, data):
    overlap = data.draw(st.integers(0, size - 1))
    bounds = windows(length, size, overlap)
    assert bounds[0][0] == 0 and bounds[-1][1] == length
    assert all(end - start <= size for start, end in bounds)
    assert all(end - start == size for start, end in bounds[:-1])
    assert all(before[1] - after[0] == overlap for before, after in itertools.pairwise(bounds))
    assert {i for start, end in bounds for i in range(start, end)} == set(range(length))
    assert len(bounds) == 1 if length <= size else len(bounds) > 1


@pytest.mark.parametrize(("size", "overlap"), [(4, 4), (4, 5), (4, -1), (0, 0)])
def test_windows_that_would_never_advance_are_refused(size, overlap):
    with pytest.raises(InputError, match=f"below their size {size}; it is {overlap}"):
        windows(10, size, overlap)


def test_rows_and_padding(tokenizer):
    first, second = Tokens(np.array([9, 8]), np.zeros((2, 2))), Tokens(np.array([7]), np.zeros((1, 2)))
    c, s = tokenizer.cls_id, tokenizer.sep_id
    rows = [tokenizer.row(first, second, owner=3), tokenizer.row(second)]
    assert rows[0].owner == 3
    inputs = pad(rows, tokenizer.pad_id)
    assert inputs["input_ids"].tolist() == [[c, 9, 8, s, 7, s], [c, 7, s, 0, 0, 0]]
    assert inputs["attention_mask"].tolist() == [[1] * 6, [1, 1, 1, 0, 0, 0]]
    assert inputs["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1], [0] * 6]
    assert {array.dtype for array in inputs.values()} == {np.dtype(np.int64)}
    assert pad([Row(np.array([1]), np.array([0]))], 5, length=3)["input_ids"].tolist() == [[1, 5, 5]]
