"""WordPiece tokenization: text to ids and offsets, rows for the encoder, windows over long texts.

Offsets are Unicode code points: `text[start:end]` is the token's text in any script. User text never becomes a
special token: a typed `[MASK]` is five characters and a bracket, in training data and in requests alike.
"""

import json
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from bertship.errors import InputError, seen

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
NO_OFFSET = -1


@dataclass(frozen=True)
class Tokens:
    """A tokenized text without special tokens: `ids` int64 [T], `offsets` int32 [T, 2] code points, end exclusive."""

    ids: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Row:
    """One sequence for the encoder, unpadded.

    `ids`, `types`: int64 [S]; `owner`: index of the example that the row belongs to; `offsets`: int32 [S, 2], the
    token's place in the example's text for tokens that may be part of an answer, NO_OFFSET elsewhere.
    """

    ids: np.ndarray
    types: np.ndarray
    owner: int = 0
    offsets: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)


class Tokenizer:
    """A BERT tokenizer, safe to share between threads: nothing of it is changed after construction.

    Raises InputError when the files are no WordPiece tokenizer, lack a special token, or contradict each other.
    """

    def __init__(self, backend: tokenizers.Tokenizer, where: str = "tokenizer") -> None:
        kind = type(backend.model).__name__
        if kind != "WordPiece":
            raise InputError(f"{where} is a {kind} tokenizer; BERT's WordPiece is needed")
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True  # text is text, whatever it looks like
        missing = [token for token in SPECIAL_TOKENS if backend.token_to_id(token) is None]
        if missing:
            raise InputError(f"{where} lacks the special tokens {', '.join(missing)}")
        self.backend = backend
        ids = [backend.get_vocab(with_added_tokens=True)[token] for token in SPECIAL_TOKENS]
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = ids
        # by the largest id, not by the count: where a piece stands twice in a vocabulary, one id has no piece
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self.lowercase: bool = backend.normalizer is not None and backend.normalizer.normalize_str("A") == "a"

    @classmethod
    def from_file(cls, path: Path) -> "Tokenizer":
        """From a `tokenizer.json`."""
        try:
            return cls(tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8")), str(path))
        except FileNotFoundError:
            raise InputError(f"no such file: {path}") from None
        except InputError:
            raise
        except Exception as error:  # the library raises plain Exception
            raise InputError(f"{path} is no tokenizer: {error}") from None

    @classmethod
    def from_dir(cls, model_dir: Path) -> "Tokenizer":
        """From a Hugging Face model directory: `tokenizer.json`, or `vocab.txt` where that is all there is.

        Casing belongs to the checkpoint: a `tokenizer_config.json` that contradicts `tokenizer.json` is refused.
        """
        settings = _settings(model_dir / "tokenizer_config.json")
        stated = settings.get("do_lower_case")
        if (model_dir / "tokenizer.json").is_file():
            tokenizer = cls.from_file(model_dir / "tokenizer.json")
            if stated is not None and stated != tokenizer.lowercase:
                raise InputError(
                    f"{model_dir}: tokenizer_config.json says do_lower_case={stated}, tokenizer.json lowercases: "
                    f"{tokenizer.lowercase}; take both files from the checkpoint"
                )
            return tokenizer
        if (model_dir / "vocab.txt").is_file():
            return cls.from_vocab(
                read_vocab(model_dir / "vocab.txt"),
                lowercase=stated is not False,
                strip_accents=settings.get("strip_accents"),
                chinese_apart=settings.get("tokenize_chinese_chars", True),
            )
        raise InputError(f"no tokenizer in {model_dir}: neither tokenizer.json nor vocab.txt")

    @classmethod
    def from_vocab(
        cls, pieces: Sequence[str], lowercase: bool, strip_accents: bool | None = None, chinese_apart: bool = True
    ) -> "Tokenizer":
        """From the pieces in the order of their ids; the rest as for `bert_backend`."""
        vocab = {piece: index for index, piece in enumerate(pieces)}
        return cls(bert_backend(vocab, lowercase, strip_accents, chinese_apart), "the vocabulary")

    @property
    def special_ids(self) -> tuple[int, ...]:
        return (self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id)

    def tokenize(self, texts: Sequence[str]) -> list[Tokens]:
        """Ids and offsets of each text, without special tokens and of any length."""
        if len(texts) == 1:  # without waking the library's own threads
            encodings = [self.backend.encode(texts[0], add_special_tokens=False)]
        else:
            encodings = self.backend.encode_batch(list(texts), add_special_tokens=False)
        return [
            Tokens(np.array(e.ids, np.int64), _over_marks(text, np.array(e.offsets, np.int32).reshape(-1, 2)))
            for text, e in zip(texts, encodings, strict=True)
        ]

    def row(self, first: Tokens, second: Tokens | None = None, owner: int = 0) -> Row:
        """`[CLS] first [SEP]` of segment 0, then `second [SEP]` of segment 1 (Devlin et al. 2019, figure 2)."""
        parts = [[self.cls_id], first.ids, [self.sep_id]]
        if second is not None:
            parts += [second.ids, [self.sep_id]]
        ids = np.concatenate([np.asarray(part, np.int64) for part in parts])
        types = np.zeros(len(ids), np.int64)
        types[len(first) + 2 :] = 1
        return Row(ids, types, owner)

    def save(self, model_dir: Path, max_tokens: int = 512) -> None:
        """Write the Hugging Face tokenizer files: tokenizer.json, vocab.txt and the two configurations."""
        piece_of = {index: piece for piece, index in self.backend.get_vocab(with_added_tokens=True).items()}
        # the line's number is the id, so an id without a piece keeps its line, blank
        lines = [f"{piece_of.get(index, '')}\n" for index in range(self.vocab_size)]
        normalizer = json.loads(self.backend.to_str())["normalizer"] or {}
        self.backend.save(str(model_dir / "tokenizer.json"))
        (model_dir / "vocab.txt").write_text("".join(lines), "utf-8", newline="\n")
        names = {
            f"{name}_token": token
            for name, token in zip(("pad", "unk", "cls", "sep", "mask"), SPECIAL_TOKENS, strict=True)
        }
        settings = {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": self.lowercase,
            "strip_accents": normalizer.get("strip_accents"),
            "tokenize_chinese_chars": normalizer.get("handle_chinese_chars", True),
            "model_max_length": max_tokens,
            **names,
        }
        (model_dir / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
        (model_dir / "special_tokens_map.json").write_text(json.dumps(names, indent=2) + "\n", "utf-8")


def bert_backend(
    vocab: dict[str, int], lowercase: bool, strip_accents: bool | None = None, chinese_apart: bool = True
) -> tokenizers.Tokenizer:
    """BERT's pipeline over a vocabulary; `strip_accents` None: with lowercasing only, as the paper's code does."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=100))
    backend.normalizer = tokenizers.normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=chinese_apart, strip_accents=strip_accents, lowercase=lowercase
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.decoder = tokenizers.decoders.WordPiece(prefix="##")
    backend.add_special_tokens([token for token in SPECIAL_TOKENS if token in vocab])
    if {"[CLS]", "[SEP]"} <= vocab.keys():
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS]:0 $A:0 [SEP]:0",
            pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
            special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
        )
    return backend


def read_vocab(path: Path) -> list[str]:
    """The pieces of a `vocab.txt`: one a line, parted by `\\n` alone, the id being the line's number.

    Generic line splitting would also break at U+2028 and the like, which real vocabularies contain.
    """
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")
    except FileNotFoundError:
        raise InputError(f"no such file: {path}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 at byte {error.start}") from None
    return [line.removesuffix("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]


def pad(rows: Sequence[Row], pad_id: int, length: int | None = None) -> dict[str, np.ndarray]:
    """The encoder's inputs by name, each int64 [B, S], padded on the right to the longest row or to `length`."""
    longest = max(map(len, rows)) if length is None else length
    ids = np.full((len(rows), longest), pad_id, np.int64)
    mask = np.zeros((len(rows), longest), np.int64)
    types = np.zeros((len(rows), longest), np.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)], types[i, : len(row)] = row.ids, 1, row.types
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


def windows(length: int, size: int, overlap: int) -> list[tuple[int, int]]:
    """Bounds of the windows over `length` tokens: each `size` long, neighbours sharing `overlap` tokens.

    Every token is in some window; a text that fits is one window; an empty text is one empty window.
    """
    if not 0 <= overlap < size:
        raise InputError(f"the overlap of windows must be at least 0 and below their size {size}; it is {overlap}")
    bounds, start = [], 0
    while True:
        end = min(start + size, length)
        bounds.append((start, end))
        if end == length:
            return bounds
        start = end - overlap


def _over_marks(text: str, offsets: np.ndarray) -> np.ndarray:
    """Offsets whose ends take in the combining marks that the normalizer removed after the token, as in `e` + U+0301.

    Without them the answer "café" would end before its accent.
    """
    if text.isascii() or not len(offsets):
        return offsets
    dropped = np.array([unicodedata.category(character) == "Mn" for character in text] + [False])
    if dropped.any():
        for start, end in offsets.tolist():
            dropped[start:end] = False
        places = np.where(dropped, len(text), np.arange(len(text) + 1))
        after = np.minimum.accumulate(places[::-1])[::-1]  # the first place from here on that is kept
        offsets[:, 1] = after[offsets[:, 1]]
    return offsets


def _settings(path: Path) -> dict[str, Any]:
    """What a `tokenizer_config.json` states; nothing where it is not there."""
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise InputError(f"{path} holds {seen(settings, 40)}, an object is needed")
    for name in ("do_lower_case", "strip_accents", "tokenize_chinese_chars"):
        if not isinstance(settings.get(name), bool | None):
            raise InputError(f"{path}: {name} is {seen(settings[name], 40)}, true or false is needed")
    return {name: value for name, value in settings.items() if value is not None}
