"""bertship/tasks/ner.py: one label a word, whatever the text's length; entities are the text's own characters."""

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertship.errors import InputError
from bertship.pipeline import Pipeline
from bertship.tasks import TASKS, Example
from bertship.tasks.base import row_table
from bertship.tasks.ner import IGNORED, Entity, entities_of, split_words, tag_words
from bertship.tokenization import NO_OFFSET, SPECIAL_TOKENS, Tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz.()👍"
TOKENIZER = Tokenizer.from_vocab([*SPECIAL_TOKENS, *LETTERS, *("##" + c for c in LETTERS)], lowercase=True)
TAGS = ("O", "B-P", "I-P", "B-L", "I-L")
NER = dataclasses.replace(TASKS["ner"], labels=TAGS, max_tokens=10, overlap=3)
TOKEN = NER.behaviour
WORDS = json.loads((Path(__file__).parent / "golden" / "words.json").read_text("utf-8"))


@pytest.mark.parametrize("text", WORDS)
def test_words_of_raw_text(text):
    assert [text[start:end] for start, end in split_words(text)] == WORDS[text]


@given(st.text(max_size=30))
def test_words_hold_all_but_white_space(text):
    words = split_words(text)
    assert "".join(text[start:end] for start, end in words) == "".join(text.split())
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(words))


def spans_of(count):
    return [(2 * i, 2 * i + 1) for i in range(count)]


@pytest.mark.parametrize(
    ("tags", "entities"),
    [
        ("B-P I-P O B-L", [("P", 0, 3), ("L", 6, 7)]),  # IOB2
        ("I-P I-P O I-L", [("P", 0, 3), ("L", 6, 7)]),  # the same in IOB1
        ("I-P B-P", [("P", 0, 1), ("P", 2, 3)]),  # IOB1: B- parts neighbours of one kind
        ("B-P B-P I-P", [("P", 0, 1), ("P", 2, 5)]),
        ("B-P I-L", [("P", 0, 1), ("L", 2, 3)]),
        ("O O", []),
    ],
)
def test_entities_of_tags(tags, entities):
    tags = tags.split()
    assert entities_of(spans_of(len(tags)), tags) == entities


@given(st.lists(st.sampled_from(TAGS), max_size=20))
def test_entities_and_tags_round_trip(tags):
    words = spans_of(len(tags))
    entities = entities_of(words, tags)
    tagged = tag_words(words, entities)
    assert [place for place, _ in tagged] == words
    assert entities_of(words, [tag for _, tag in tagged]) == entities


def example(words, tags):
    text = " ".join(words)
    starts = np.cumsum([0, *(len(word) + 1 for word in words)])[:-1].tolist()
    places = [(start, start + len(word)) for start, word in zip(starts, words, strict=True)]
    return Example({"TEXT": text, "WORDS": places}, entities_of(places, tags), "f, line 1")


def rows_of(made, task=NER):
    return task.behaviour.encode(task, TOKENIZER, {name: [value] for name, value in made.columns.items()}).rows


def perfect(made):
    """A runner that knows every word's tag at its pieces, and says something else between them."""
    tags = dict(tag_words(made.columns["WORDS"], made.target))

    def run(rows):
        logits = []
        for row in rows:
            values = np.zeros((len(row), len(TAGS)))
            for i, place in enumerate(map(tuple, row.offsets.tolist())):
                values[i, TAGS.index(tags[place]) if place[0] != NO_OFFSET else 1] = 9
            logits.append(values)
        return {"logits": logits}

    return run


def answer(made, runner, task=NER, annotated=True):
    columns = {name: [value] for name, value in made.columns.items() if annotated or name == "TEXT"}
    return json.loads(Pipeline(task, TOKENIZER, runner)(columns)["ENTITIES"][0])


@given(
    st.lists(st.tuples(st.text("abc", min_size=1, max_size=14), st.sampled_from(TAGS)), max_size=30), st.integers(0, 9)
)
def test_every_word_keeps_its_label(tagged, overlap):
    """fit.9: through any number of windows, words longer than a window included; and each is trained."""
    task = dataclasses.replace(NER, overlap=overlap)
    made = example([word for word, _ in tagged], [tag for _, tag in tagged])
    found = answer(made, perfect(made), task)
    assert [(e["label"], e["start"], e["end"]) for e in found] == made.target
    assert all(e["text"] == made.columns["TEXT"][e["start"] : e["end"]] for e in found)
    rows = rows_of(made, task)
    learnt = {}
    for row, labels in zip(rows, TOKEN.targets(task, rows, [made]), strict=True):
        assert len(labels) == len(row) <= task.max_tokens
        for place, label in zip(map(tuple, row.offsets.tolist()), labels.tolist(), strict=True):
            if label != IGNORED:
                learnt.setdefault(place, set()).add(TAGS[label])
    assert learnt == {place: {tag} for place, tag in tag_words(made.columns["WORDS"], made.target)}


def test_a_label_stands_at_a_words_first_piece_alone():
    made = example(["abc", "d", "efgh", "ijklmnop"], ["B-P", "I-P", "O", "B-L"])
    rows = rows_of(made)
    targets = TOKEN.targets(NER, rows, [made])
    x = IGNORED
    assert targets[0].tolist() == [x, 1, x, x, 2, 0, x, x, x, x]  # [CLS] a b c d e f g h [SEP]
    # f g h begin the second window, and are the rest of a word that the first one labels
    assert targets[1].tolist() == [x, x, x, x, 3, x, x, x, x, x]
    assert targets[2].tolist() == [x] * 8  # n o p: nothing begins here
    assert len(rows) == 3


def test_the_window_with_most_context_decides():
    made = example(list("abcdefghijklm"), ["O"] * 13)  # windows a-h and f-m share f g h
    rows = rows_of(made)
    assert [TOKENIZER.backend.decode(row.ids) for row in rows] == ["a b c d e f g h", "f g h i j k l m"]
    logits = [np.zeros((len(row), len(TAGS))) for row in rows]
    logits[0][:, TAGS.index("B-P")] = 9
    logits[1][:, TAGS.index("B-L")] = 9
    columns = {name: [value] for name, value in made.columns.items()}
    found = TOKEN.decode(NER, columns, row_table(TOKEN, rows), {"logits": logits}, {})["ENTITIES"][0]
    # f has 2 to its right in the first and 0 to its left in the second, g has 1 in each, h 0 and 2
    assert [(e["text"], e["label"]) for e in json.loads(found)] == [
        (c, "P" if c < "h" else "L") for c in "abcdefghijklm"
    ]


def test_an_entity_across_windows_is_one_entity():
    made = example(list("abcdefghijklm"), ["O"] * 6 + ["B-P", *["I-P"] * 3] + ["O"] * 3)
    found = answer(made, perfect(made))
    assert [(e["text"], e["label"]) for e in found] == [("g h i j", "P")]


def test_an_entitys_score_is_its_words_mean():
    made = example(["a", "b"], ["B-P", "I-P"])

    def run(rows):
        values = np.full((4, len(TAGS)), -1e9)
        values[1, 1] = values[1, 0] = 0.0  # B-P at 0.5, the first of equals being O
        values[1, 1] += 1e-9
        values[2, 2] = 0.0
        return {"logits": [values]}

    assert answer(made, run)[0]["score"] == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("aggregation", "label", "score"), [("first", "P", 0.6), ("average", "L", 0.6), ("max", "L", 0.9)]
)
def test_a_words_pieces_can_be_read_together(aggregation, label, score):
    """B-P at 0.6 in the first of three pieces, B-L at 0.3, 0.6 and 0.9."""
    made = example(["abc", "d"], ["B-P", "O"])
    shares = {1: {"B-P": 0.6, "B-L": 0.3}, 2: {"B-P": 0.2, "B-L": 0.6}, 3: {"B-P": 0.0, "B-L": 0.9}}

    def run(rows):
        values = np.full((len(rows[0]), len(TAGS)), 1e-9)
        values[:, 0] = 1  # everything else is outside
        for token, of in shares.items():
            values[token] = [of.get(tag, 1e-9) for tag in TAGS]
            values[token, 0] = 1 - sum(of.values())
        return {"logits": [np.log(np.maximum(values, 1e-9))]}

    columns = {name: [value] for name, value in made.columns.items()}
    found = Pipeline(NER, TOKENIZER, run)(columns, {"aggregation": aggregation})["ENTITIES"][0]
    assert [(e["label"], e["text"]) for e in json.loads(found)] == [(label, "abc")]
    assert json.loads(found)[0]["score"] == pytest.approx(score, abs=1e-6)


@pytest.mark.parametrize("removed", ["\u200b", "\ufffd", "\u0301"])
def test_a_word_without_pieces_harms_nothing(removed):
    made = example(["a", removed, "b"], ["B-P", "I-P", "O"])
    rows = rows_of(made)
    assert TOKEN.targets(NER, rows, [made])[0].tolist() == [IGNORED, 1, 0, IGNORED]
    assert [e["text"] for e in answer(made, perfect(made))] == ["a"]
    alone = example([removed], ["B-P"])
    assert [t.tolist() for t in TOKEN.targets(NER, rows_of(alone), [alone])] == [[IGNORED] * 2]
    assert answer(alone, perfect(alone)) == []


def test_raw_text_is_cut_into_words():
    text = "(ab.c) 👍 d."
    made = Example({"TEXT": text, "WORDS": split_words(text)}, [Entity("P", 1, 5), Entity("L", 7, 8)], "f")
    found = answer(made, perfect(made), annotated=False)
    assert [(e["label"], e["text"], e["start"], e["end"]) for e in found] == [("P", "ab.c", 1, 5), ("L", "👍", 7, 8)]


def test_answers_belong_to_their_texts():
    pipeline = Pipeline(NER, TOKENIZER, lambda rows: {"logits": [np.eye(5)[np.full(len(r), 1)] for r in rows]})
    answers = pipeline({"TEXT": ["", "a", " ", "b c d e f g h i j k"]})
    assert [[e["text"] for e in json.loads(a)] for a in answers["ENTITIES"]] == [[], ["a"], [], list("bcdefghijk")]
    assert answers["TRUNCATED"].tolist() == [False] * 4


def test_labels_in_and_check():
    made = [example(["a", "b"], ["I-P", "B-L"]), example(["c"], ["O"])]
    assert TOKEN.labels_in(made) == ("O", "B-L", "I-L", "B-P", "I-P")
    TOKEN.check(NER, made)
    with pytest.raises(InputError, match="f, line 1: entity 'X' is unknown to task ner; its labels are O, B-P"):
        TOKEN.check(NER, [example(["a"], ["B-X"])])


def test_score_is_by_place_and_label():
    made = [example(["a", "b"], ["B-P", "O"]), example(["c"], ["B-L"])]
    right = json.dumps([{"label": "P", "start": 0, "end": 1}])
    wrong = json.dumps([{"label": "P", "start": 0, "end": 1}])
    assert TOKEN.score(NER, made, {"ENTITIES": [right, wrong]})["f1"] == 0.5
