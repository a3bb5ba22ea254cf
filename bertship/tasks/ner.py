"""Named entities: one label a word, read at the word's first piece (Devlin et al. 2019, section 5.3).

A request may have it read otherwise: `aggregation` is `first`, `average` (the pieces' probabilities averaged) or `max`
(the piece whose best label is the most probable). A model is trained on first pieces alone, so `first` is the default.
Raw text is cut into words by `split_words`, here and nowhere else. Long texts become overlapping windows; a word's
label comes from the window in which it has the most context.
"""

import itertools
import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from bertship.errors import InputError, seen
from bertship.metrics import score_entities
from bertship.tasks.base import (
    Answers,
    Columns,
    Encoded,
    Example,
    Files,
    Hub,
    Judged,
    Kind,
    Logits,
    Option,
    Table,
    Task,
    TensorSpec,
    register,
    register_kind,
    short,
    softmax,
)
from bertship.tokenization import NO_OFFSET, Row, Tokenizer, Tokens, windows

OUTSIDE = "O"
AGGREGATIONS = ("first", "average", "max")
IGNORED = -100  # a label that the loss leaves out: special tokens and pieces after a word's first


class Entity(NamedTuple):
    """A labelled span in code points, end exclusive."""

    label: str
    start: int
    end: int


@register_kind
class Token(Kind):
    """Entities in a text. Targets are lists of `Entity`; labels are IOB2 tags."""

    name = "token"
    head = "token"
    loss = "token"
    inputs = ("TEXT",)
    annotations = ("WORDS",)  # each text's words as [start, end] in code points
    row_tensors = (TensorSpec("OWNER", "INT32"), TensorSpec("OFFSETS", "INT32", (-1, -1, 2)))
    options: ClassVar[Mapping[str, Option]] = {"aggregation": Option(str, choices=AGGREGATIONS)}

    def outputs(self, task: Task) -> tuple[TensorSpec, ...]:
        return (TensorSpec("ENTITIES", "BYTES"),)

    def logits(self, task: Task) -> tuple[TensorSpec, ...]:
        return (TensorSpec("logits", "FP32", (-1, len(task.labels) or -1)),)

    def encode(self, task: Task, tokenizer: Tokenizer, columns: Columns) -> Encoded:
        """Rows whose OFFSETS hold, for each piece, the place of the whole word that it belongs to."""
        texts = columns["TEXT"]
        words = columns.get("WORDS") or [split_words(text) for text in texts]
        rows = []
        size = task.max_tokens - 2
        for owner, (tokens, spans) in enumerate(zip(tokenizer.tokenize(texts), words, strict=True)):
            places = _words_of(tokens, spans)
            for start, end in windows(len(tokens), size, min(task.overlap, size - 1)):
                row = tokenizer.row(Tokens(tokens.ids[start:end], tokens.offsets[start:end]), owner=owner)
                offsets = np.full((len(row), 2), NO_OFFSET, np.int32)
                offsets[1:-1] = places[start:end]
                if start:  # the rest of a word that an earlier window begins: its label is read there
                    offsets[offsets[:, 0] == places[start - 1, 0]] = NO_OFFSET
                rows.append(Row(row.ids, row.types, owner, offsets))
        return Encoded(rows, np.zeros(len(texts), bool))

    def decode(
        self, task: Task, columns: Columns, table: Mapping[str, np.ndarray], logits: Logits, options: Mapping[str, Any]
    ) -> Answers:
        entities = []
        for i, text in enumerate(columns["TEXT"]):
            rows = np.flatnonzero(table["OWNER"] == i).tolist()
            words = _labelled_words(task, table["OFFSETS"], logits["logits"], rows, options.get("aggregation", "first"))
            entities.append(
                json.dumps(
                    [
                        {
                            "label": label,
                            "text": text[start:end],
                            "start": start,
                            "end": end,
                            "score": short(score),
                        }
                        for (label, start, end), score in _merge(words)
                    ],
                    ensure_ascii=False,
                )
            )
        return {"ENTITIES": np.array(entities, object)}

    def targets(self, task: Task, rows: Sequence[Row], examples: Sequence[Example]) -> list[Any]:
        """A label index for each token: the word's tag at its first piece, IGNORED elsewhere."""
        index = {label: i for i, label in enumerate(task.labels)}
        found = []
        for row in rows:
            assert row.offsets is not None
            tags = dict(tag_words(examples[row.owner].columns["WORDS"], examples[row.owner].target))
            labels = np.full(len(row), IGNORED, np.int64)
            for place in np.flatnonzero(_first_pieces(row.offsets)):
                labels[place] = index[tags[int(row.offsets[place, 0]), int(row.offsets[place, 1])]]
            found.append(labels)
        return found

    def score(self, task: Task, examples: Sequence[Example], answers: Answers) -> dict[str, float]:
        predicted = [[Entity(e["label"], e["start"], e["end"]) for e in json.loads(a)] for a in answers["ENTITIES"]]
        return score_entities([list(e.target) for e in examples], predicted)

    def degenerate(self, task: Task, examples: Sequence[Example], answers: Answers) -> str:
        if all(answer == "[]" for answer in answers["ENTITIES"]) and any(example.target for example in examples):
            return "no entity is found"
        return ""

    def judged(self, task: Task, examples: Sequence[Example], answers: Answers) -> list[Judged]:
        found = []
        for example, answer in zip(examples, answers["ENTITIES"], strict=True):
            text, entities = example.columns["TEXT"], json.loads(answer)
            gold = {tuple(entity) for entity in example.target}
            guessed = {(e["label"], e["start"], e["end"]): e["score"] for e in entities}
            error = len(gold - guessed.keys()) + sum(score for place, score in guessed.items() if place not in gold)
            shown = [
                "; ".join(f"{label}: {text[start:end]}" for label, start, end in sorted(places, key=lambda p: p[1]))
                for places in (gold, guessed)
            ]
            found.append(Judged(shown[0], shown[1], float(error)))
        return found

    def confidences(self, task: Task, examples: Sequence[Example], answers: Answers) -> tuple[np.ndarray, np.ndarray]:
        """Of each entity that was found."""
        scores, right = [], []
        for example, answer in zip(examples, answers["ENTITIES"], strict=True):
            gold = {tuple(entity) for entity in example.target}
            for e in json.loads(answer):
                scores.append(e["score"])
                right.append((e["label"], e["start"], e["end"]) in gold)
        return np.array(scores, np.float64), np.array(right, bool)

    def tables(self, task: Task, examples: Sequence[Example], answers: Answers) -> list[Table]:
        """F1, precision and recall of each label."""
        predicted = self.decisions(answers)
        rows = []
        for kind in sorted({label[2:] for label in task.labels if label != OUTSIDE}):
            gold = [[e for e in example.target if e.label == kind] for example in examples]
            score = score_entities(gold, [[e for e in found if e[0] == kind] for found in predicted])
            rows.append((kind, sum(map(len, gold)), score["f1"], score["precision"], score["recall"]))
        return [("By label", ("label", "entities", "F1", "precision", "recall"), rows)]

    def official(self, task: Task, examples: Sequence[Example], details: Answers) -> dict[str, str]:
        """A word, its tag and the predicted tag a line, which conlleval reads."""
        lines = []
        for example, answer in zip(examples, details["ENTITIES"], strict=True):
            words, text = example.columns["WORDS"], example.columns["TEXT"]
            found = [Entity(e["label"], e["start"], e["end"]) for e in json.loads(answer)]
            for (place, tag), (_, guess) in zip(tag_words(words, example.target), tag_words(words, found), strict=True):
                lines.append(f"{text[place[0] : place[1]]} {tag} {guess}")
            lines.append("")
        return {"predictions.conll": "\n".join(lines)}

    def example(
        self, task: Task, columns: Mapping[str, Any], target: Any, where: str, id: str = "", start: Any = None
    ) -> Example:
        """`columns` and `target` are words and their tags, or a text and its entities as {"label", "start", "end"}."""
        if "WORDS" in columns:
            return words_example([(list(columns["WORDS"]), list(target))], where, id)
        text = columns["TEXT"]
        words = split_words(text)
        starts, ends = {start for start, _ in words}, {end for _, end in words}
        entities = []
        for given in target or ():
            try:
                entity = Entity(str(given["label"]), int(given["start"]), int(given["end"]))
            except (KeyError, TypeError, ValueError):
                raise InputError(
                    f"{where}: entity {seen(given, 80)}: label, start and end (code points) needed"
                ) from None
            if entity.start not in starts or entity.end not in ends or entity.start >= entity.end:
                raise InputError(
                    f"{where}: entity {seen(text[max(entity.start, 0) : max(entity.end, 0)], 60)} at {entity.start} to "
                    f"{entity.end} does not begin and end where words do; correct its places"
                )
            entities.append(entity)
        entities.sort(key=lambda entity: entity.start)
        for before, after in itertools.pairwise(entities):
            if after.start < before.end:
                raise InputError(f"{where}: entities at {before.start} and {after.start} overlap; keep one of them")
        return Example({"TEXT": text, "WORDS": words}, entities, where, id)

    def decisions(self, answers: Answers) -> list[Any]:
        return [[(e["label"], e["start"], e["end"]) for e in json.loads(a)] for a in answers["ENTITIES"]]

    def labels_in(self, examples: Iterable[Example]) -> tuple[str, ...]:
        kinds = sorted({entity.label for example in examples for entity in example.target})
        return (OUTSIDE, *(f"{prefix}-{kind}" for kind in kinds for prefix in "BI"))

    def check(self, task: Task, examples: Sequence[Example]) -> None:
        known = set(task.labels)
        for example in examples:
            for entity in example.target:
                if f"B-{entity.label}" not in known:
                    raise InputError(
                        f"{example.where}: entity {entity.label!r} is unknown to task {task.name}; "
                        f"its labels are {', '.join(task.labels)}"
                    )


def split_words(text: str) -> list[tuple[int, int]]:
    """Words of a raw text as code points: runs without white space, their outer punctuation each a word of its own.

    `"U.S.-based (ACME)."` gives `U.S.-based`, `(`, `ACME`, `)`, `.`; leading `@` and `#` stay, as in tweets.
    """
    words, start = [], None
    for place, character in enumerate(text + " "):
        if character.isspace():
            if start is not None:
                words += _peel(text, start, place)
            start = None
        elif start is None:
            start = place
    return words


def _peel(text: str, start: int, end: int) -> list[tuple[int, int]]:
    before, after = [], []
    while start < end and _outer(text[start]) and text[start] not in "@#":
        before.append((start, start + 1))
        start += 1
    while end > start and _outer(text[end - 1]):
        after.append((end - 1, end))
        end -= 1
    return [*before, *([(start, end)] if start < end else []), *reversed(after)]


def _outer(character: str) -> bool:
    """Punctuation, or a format character without width (zero-width space, byte order mark, soft hyphen)."""
    return unicodedata.category(character).startswith(("P", "Cf"))


def tag_words(words: Sequence[Sequence[int]], entities: Sequence[Entity]) -> list[tuple[tuple[int, int], str]]:
    """Each word's IOB2 tag: B for an entity's first word, I inside it, O elsewhere."""
    starts = {start: label for label, start, _ in entities}
    tagged, label, until = [], None, -1
    ends = {start: end for _, start, end in entities}
    for start, end in words:
        if start in starts:
            label, until = starts[start], ends[start]
            tag = f"B-{label}"
        elif label is not None and end <= until:
            tag = f"I-{label}"
        else:
            label, tag = None, OUTSIDE
        tagged.append(((int(start), int(end)), tag))
    return tagged


def entities_of(words: Sequence[Sequence[int]], tags: Sequence[str]) -> list[Entity]:
    """Entities of tagged words, from IOB1 or IOB2: an `I-` that continues nothing begins an entity."""
    tagged = [(int(start), int(end), tag, 1.0) for (start, end), tag in zip(words, tags, strict=True)]
    return [entity for entity, _ in _merge(tagged)]


def words_example(sentences: Sequence[tuple[list[str], list[str]]], where: str, id: str = "") -> Example:
    """Words and their tags, sentence by sentence, as one example: words parted by a space, sentences by a line feed."""
    spans: list[tuple[int, int]] = []
    entities: list[Entity] = []
    lines, at = [], 0
    for words, tags in sentences:
        places = []
        for word in words:
            places.append((at, at + len(word)))
            at += len(word) + 1
        entities += entities_of(places, tags)
        spans += places
        lines.append(" ".join(words))
    return Example({"TEXT": "\n".join(lines), "WORDS": spans}, entities, where, id)


def _merge(words: Iterable[tuple[int, int, str, float]]) -> list[tuple[Entity, float]]:
    """Tagged words to entities; an entity's score is the mean probability of its words' tags."""
    merged: list[tuple[Entity, list[float]]] = []
    previous = OUTSIDE
    for start, end, tag, score in words:
        if tag != OUTSIDE:
            prefix, _, label = tag.partition("-")
            if prefix == "I" and previous != OUTSIDE and previous.partition("-")[2] == label:
                entity, scores = merged[-1]
                merged[-1] = (entity._replace(end=end), [*scores, score])
            else:
                merged.append((Entity(label, start, end), [score]))
        previous = tag
    return [(entity, sum(scores) / len(scores)) for entity, scores in merged]


def _words_of(tokens: Tokens, words: Sequence[Sequence[int]]) -> np.ndarray:
    """For each token the place of the word that it lies in, NO_OFFSET for a token between words: int32 [T, 2]."""
    places = np.full((len(tokens), 2), NO_OFFSET, np.int32)
    if len(words) and len(tokens):
        spans = np.asarray(words, np.int32)
        word = np.searchsorted(spans[:, 0], tokens.offsets[:, 0], side="right") - 1
        inside = (word >= 0) & (tokens.offsets[:, 0] < spans[word, 1])
        places[inside] = spans[word[inside]]
    return places


def _first_pieces(offsets: np.ndarray) -> np.ndarray:
    """Which tokens begin a word: bool [S]."""
    previous = np.vstack([[[NO_OFFSET, NO_OFFSET]], offsets[:-1]])
    return (offsets[:, 0] != NO_OFFSET) & (offsets[:, 0] != previous[:, 0])


def _labelled_words(
    task: Task, offsets: np.ndarray, logits: Sequence[np.ndarray], rows: Sequence[int], aggregation: str = "first"
) -> list[tuple[int, int, str, float]]:
    """Each word once, in order: start, end, tag, and the tag's probability.

    Its pieces are those in the window that it is read in; a word longer than a window has more elsewhere.
    """
    best: dict[tuple[int, int], tuple[int, int, int]] = {}
    for w in rows:
        places = offsets[w]
        tokens = np.flatnonzero(places[:, 0] != NO_OFFSET)
        if not len(tokens):
            continue
        for token in np.flatnonzero(_first_pieces(places)).tolist():
            word = (int(places[token, 0]), int(places[token, 1]))
            context = int(min(token - tokens[0], tokens[-1] - token))
            # the earlier window wins a tie
            if word not in best or context > best[word][0]:
                best[word] = (context, w, token)
    labelled = []
    for (start, end), (_, w, token) in sorted(best.items()):
        pieces = token + np.arange(int((offsets[w][token:, 0] == start).sum())) if aggregation != "first" else [token]
        probabilities = softmax(np.stack([logits[w][piece] for piece in pieces]))
        if aggregation == "max":
            probabilities = probabilities[probabilities.max(axis=1).argmax()]
        else:
            probabilities = probabilities.mean(axis=0) if len(pieces) > 1 else probabilities[0]
        label = int(probabilities.argmax())
        labelled.append((start, end, task.labels[label], float(probabilities[label])))
    return labelled


register(
    Task(
        name="ner",
        kind="token",
        description="named entities in a text (CoNLL columns)",
        metrics=("f1", "precision", "recall"),
        max_tokens=128,
        overlap=32,
        options={"aggregation": "first"},
        files=Files(
            format="conll",
            splits={
                "train": ("train.conll", "train.txt", "eng.train"),
                "dev": ("dev.conll", "valid.txt", "dev.txt", "eng.testa"),
            },
        ),
        hub=Hub(
            "eriktks/conll2003",
            revision="refs/convert/parquet",
            splits={"train": "train", "dev": "validation"},
            columns={"WORDS": "tokens"},
            target="ner_tags",
        ),
        training={"epochs": 3, "learning_rate": 1e-4},
    )
)
