"""Every named set in the layout that it is published in: what is read, what is left out, and what the hub calls it."""

import json
from pathlib import Path

import numpy as np
import pytest

from bertship.errors import InputError
from bertship.pipeline import Pipeline
from bertship.tasks import TASKS
from bertship.tasks.hub import examples_of, read_hub
from bertship.tasks.readers import read_split
from bertship.tokenization import SPECIAL_TOKENS, Tokenizer
from train.data import SAMPLES, load_examples

DATA = Path(__file__).parents[2] / "shared" / "data"
TOKENIZER = Tokenizer.from_vocab([*SPECIAL_TOKENS, *"abcdefghijklmnopqrstuvwxyz"], lowercase=True)
GLUE = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli", "ax")
MNLI_HEAD = "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\t"
MNLI_HEAD += "sentence2_parse\tsentence1\tsentence2\tlabel1"
AX_HEAD = "Lexical Semantics\tPredicate-Argument Structure\tLogic\tKnowledge\tDomain\tPremise\tHypothesis\tLabel\n"
SWAG_HEAD = ",video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3,label\n"


def read(tmp_path, name, file, content, split="train"):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    said = []
    examples = read_split(TASKS[name], tmp_path, split, said.append)
    if not split.startswith("test"):
        TASKS[name].behaviour.check(TASKS[name], examples)
    return examples, said


def rows(examples):
    return [(*e.columns.values(), e.target) for e in examples]


def test_all_names_are_there():
    assert set(GLUE) | {"swag", "squad", "squad2", "ner"} == set(TASKS)


def test_cola_has_no_header_and_its_test_split_has_one(tmp_path):
    found, _ = read(tmp_path, "cola", "train.tsv", 'gj04\t1\t\tShe said "so.\nbc01\t0\t*\tThem slept.\n')
    assert rows(found) == [('She said "so.', "acceptable"), ("Them slept.", "unacceptable")]
    found, _ = read(tmp_path, "cola", "test.tsv", "index\tsentence\n0\tBill slept.\n1\tBill.\n", "test")
    assert [(e.columns["TEXT"], e.target, e.id) for e in found] == [("Bill slept.", None, "0"), ("Bill.", None, "1")]


def test_mrpc_has_a_byte_order_mark_and_stray_quotes(tmp_path):
    """fit.10"""
    content = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    content += '1\t1\t2\t" It is done , he said .\tHe said : " It is done .\n0\t3\t4\t"A"\tB "\n'
    found, _ = read(tmp_path, "mrpc", "msr_paraphrase_train.txt", content)
    assert rows(found) == [
        ('" It is done , he said .', 'He said : " It is done .', "equivalent"),
        ('"A"', 'B "', "not_equivalent"),
    ]


def test_qqp_has_ragged_rows_which_are_left_out_and_counted(tmp_path):
    head = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    content = (
        head + "0\t1\t2\tWhat is \"a?\tWhat's a?\t1\n1\t3\t4\tcut short\n2\t5\t6\ta\tb\textra\t0\n3\t7\t8\tc\td\t0\n"
    )
    found, said = read(tmp_path, "qqp", "train.tsv", content)
    assert rows(found) == [('What is "a?', "What's a?", "duplicate"), ("c", "d", "not_duplicate")]
    assert "2 rows left out: line 3 has 4 columns, 6 expected; line 4 has 7 columns, 6 expected" in said[0]
    assert "holds 2 examples of qqp; the official train split has 363,849" in said[1]


def test_mnli_goes_by_the_labels_names(tmp_path):
    """fit.1: its splits have unlike columns, and rows that nobody agreed on."""
    row = "0\t1\t1n\tfiction\t(a)\t(b)\t(S a)\t(S b)\tA man sleeps.\tHe {}.\tneutral"
    train = f"{MNLI_HEAD}\tgold_label\n{row.format('rests')}\tentailment\n{row.format('runs')}\tcontradiction\n"
    found, _ = read(tmp_path, "mnli", "train.tsv", train)
    assert [e.target for e in found] == ["entailment", "contradiction"]
    more = "\tlabel2\tlabel3\tlabel4\tlabel5\tgold_label\n"
    dev = MNLI_HEAD + more + row.format("dreams") + "\tneutral" * 5 + "\n" + row.format("x") + "\tneutral" * 4 + "\t-\n"
    for split, file in (("dev", "dev_matched.tsv"), ("dev_mismatched", "dev_mismatched.tsv")):
        found, said = read(tmp_path, "mnli", file, dev, split)
        assert rows(found) == [("A man sleeps.", "He dreams.", "neutral")]
        assert "line 3 has no agreed label (-)" in said[0]
    assert TASKS["mnli"].more_splits == ("dev_mismatched",)
    assert TASKS["mnli"].labels == ("entailment", "neutral", "contradiction")


def test_qnli_rte_and_wnli(tmp_path):
    content = "index\tquestion\tsentence\tlabel\n0\tWho?\tAnna.\tentailment\n"
    assert rows(read(tmp_path / "a", "qnli", "train.tsv", content)[0]) == [("Who?", "Anna.", "entailment")]
    content = "index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\tnot_entailment\n"
    assert rows(read(tmp_path / "b", "rte", "train.tsv", content)[0]) == [("A.", "B.", "not_entailment")]
    content = "index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\t1\n1\tA.\tC.\t0\n"
    found, _ = read(tmp_path / "c", "wnli", "train.tsv", content)
    assert [e.target for e in found] == ["entailment", "not_entailment"]


def test_ax_reads_the_diagnostics_of_both_kinds(tmp_path):
    content = AX_HEAD + "\t\tNegation\t\tNews\tIt rained.\tIt did not.\tcontradiction\n"
    found, _ = read(tmp_path, "ax", "diagnostic/diagnostic-full.tsv", content, "dev")
    assert rows(found) == [("It rained.", "It did not.", "contradiction")]
    content = "index\tsentence1\tsentence2\n0\tIt rained.\tIt did not.\n"
    found, _ = read(tmp_path, "ax", "diagnostic/diagnostic.tsv", content, "test")
    assert [(e.id, e.target) for e in found] == [("0", None)]


def test_swag_makes_four_pairs_of_first_sentence_and_start_with_ending(tmp_path):
    """fit.11"""
    content = SWAG_HEAD + '0,v,1,"a, b c","a, b",c,gold,"d ""e""",f,g,h,2\n'
    found, _ = read(tmp_path, "swag", "train.csv", content)
    assert found[0].columns == {"TEXT": "a, b", "CHOICES": ['c d "e"', "c f", "c g", "c h"]}
    assert found[0].target == 2
    columns = {name: [found[0].columns[name]] for name in ("TEXT", "CHOICES")}
    encoded = TASKS["swag"].behaviour.encode(TASKS["swag"], TOKENIZER, columns)
    assert len(encoded.rows) == 4
    pieces = [[TOKENIZER.backend.id_to_token(i) for i in row.ids] for row in encoded.rows]
    assert pieces[1] == ["[CLS]", "a", "[UNK]", "b", "[SEP]", "c", "f", "[SEP]"]
    assert encoded.rows[1].types.tolist() == [0] * 5 + [1] * 3


@pytest.mark.parametrize(
    ("label", "says"),
    [("4", "choice 4 of 4; they count from 0"), ("x1", "line 2: 'x1' is no choice"), ("", "is empty")],
)
def test_swag_labels_that_are_none(tmp_path, label, says):
    with pytest.raises(InputError, match=says):
        read(tmp_path, "swag", "train.csv", SWAG_HEAD + f"0,v,1,s,a,b,gold,d,e,f,g,{label}\n")


def test_four_choices_share_one_softmax():
    task = TASKS["swag"]
    logits = np.array([[0.0], [3.0], [0.0], [0.0], [9.0], [0.0], [0.0], [0.0]], np.float32)
    answers = Pipeline(task, TOKENIZER, lambda rows: {"logits": logits})(
        {"TEXT": ["a", "b"], "CHOICES": [["a", "b", "c", "d"], ["a", "b", "c", "d"]]}
    )
    assert answers["CHOICE"].tolist() == [1, 0] and answers["PROBABILITIES"].shape == (2, 4)
    np.testing.assert_allclose(answers["SCORE"], [np.e**3 / (np.e**3 + 3), np.e**9 / (np.e**9 + 3)], rtol=1e-6)


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        ([["a", "b"], ["a"]], r"CHOICES\[1\] has 1 elements; two or more"),
        ([["a"], ["b"]], r"CHOICES\[0\] has 1 elements"),
        (["ab", "cd"], r"CHOICES\[0\] is 'ab', a list of strings is needed"),
        ([["a", 3], ["a", "b"]], r"CHOICES\[0\]\[1\] is 3, a string is needed"),
    ],
)
def test_choices_that_cannot_be_answered(choices, says):
    with pytest.raises(InputError, match=says):
        Pipeline(TASKS["swag"], TOKENIZER, lambda rows: {})({"TEXT": ["a", "b"], "CHOICES": choices})


def test_squad_2_has_questions_without_an_answer(tmp_path):
    questions = [
        {"id": "1", "question": "Who?", "answers": [{"text": "Anna", "answer_start": 0}], "is_impossible": False},
        {"id": "2", "question": "Why?", "answers": [], "plausible_answers": [], "is_impossible": True},
    ]
    content = {"version": "v2.0", "data": [{"title": "t", "paragraphs": [{"context": "Anna ran.", "qas": questions}]}]}
    found, _ = read(tmp_path, "squad2", "dev-v2.0.json", json.dumps(content), "dev")
    assert [e.target.answers for e in found] == [(("Anna", 0),), ()]


DOCUMENTS = "-DOCSTART- -X- O O\n\nEU NNP B-NP I-ORG\nsaid VBD B-VP O\n\nGerman JJ B-NP I-MISC\nBonn NNP I-NP B-MISC\n"
DOCUMENTS += "\n-DOCSTART- -X- O O\n\nRome NNP B-NP I-LOC\n"


def test_documents_of_conll_as_an_option(tmp_path):
    import dataclasses

    task = dataclasses.replace(TASKS["ner"], files=dataclasses.replace(TASKS["ner"].files, documents=True))
    (tmp_path / "train.txt").write_text(DOCUMENTS)
    found = read_split(task, tmp_path, "train")
    assert [e.columns["TEXT"] for e in found] == ["EU said\nGerman Bonn", "Rome"]
    assert found[0].target == [("ORG", 0, 2), ("MISC", 8, 14), ("MISC", 15, 19)]
    assert [e.where.rpartition(", ")[2] for e in found] == ["line 3", "line 11"]
    (tmp_path / "train.txt").write_text("a O\n\nb O\n")
    with pytest.raises(InputError, match=r"train.txt has no -DOCSTART- line"):
        read_split(task, tmp_path, "train")


@pytest.mark.parametrize("name", sorted(TASKS))
def test_every_name_works_without_data_and_says_what_that_is_worth(name):
    if TASKS[name].packaged:
        pytest.skip(f"{name} has packaged text")
    for split in ("train", "dev"):
        said = []
        found = load_examples(TASKS[name], None, split, said.append)
        assert len(found) >= 20 and "made-up" in said[-1] and "cannot show how good" in said[-1]
    assert (SAMPLES / name).is_dir()


@pytest.mark.parametrize(
    ("name", "folder", "counts"),
    [("cola", "glue/CoLA", {"train": 8551, "dev": 527})],
)
def test_real_sets_have_their_counts(name, folder, counts):
    if not (DATA / folder).is_dir():
        pytest.skip(f"no {DATA / folder}")
    for split, count in counts.items():
        assert len(read_split(TASKS[name], DATA / folder, split)) == count


def table(columns, label_names=None, target="label"):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            name: datasets.ClassLabel(names=label_names)
            if name == target and label_names
            else datasets.Dataset.from_dict({name: values}).features[name]
            for name, values in columns.items()
        }
    )
    return datasets.Dataset.from_dict(columns, features=features)


def test_the_hubs_class_labels_go_by_name():
    """fit.1: another order on the hub changes nothing."""
    data = table(
        {"premise": ["a", "b"], "hypothesis": ["c", "d"], "label": [0, 2], "idx": [0, 1]},
        ["contradiction", "neutral", "entailment"],
    )
    found = examples_of(TASKS["mnli"], TASKS["mnli"].hub, data, "here")
    assert rows(found) == [("a", "c", "contradiction"), ("b", "d", "entailment")]
    assert found[1].where == "here, row 1"


def test_the_hubs_other_shapes():
    data = table({"sentence1": ["a"], "sentence2": ["b"], "label": [3.75], "idx": [0]})
    assert rows(examples_of(TASKS["stsb"], TASKS["stsb"].hub, data, "x")) == [("a", "b", "3.75")]
    endings = {f"ending{i}": [letter] for i, letter in enumerate("wxyz")}
    data = table({"sent1": ["a"], "sent2": ["b"], **endings, "label": [3]}, ["0", "1", "2", "3"])
    (found,) = examples_of(TASKS["swag"], TASKS["swag"].hub, data, "x")
    assert found.columns == {"TEXT": "a", "CHOICES": ["b w", "b x", "b y", "b z"]} and found.target == 3
    data = table(
        {"id": ["q"], "question": ["who"], "context": ["an ox"], "answers": [{"text": ["ox"], "answer_start": [3]}]}
    )
    (found,) = examples_of(TASKS["squad"], TASKS["squad"].hub, data, "x")
    assert found.target == ("q", (("ox", 3),)) and found.columns == {"QUESTION": "who", "CONTEXT": "an ox"}
    datasets = pytest.importorskip("datasets")
    tags = datasets.Sequence(datasets.ClassLabel(names=["O", "B-PER", "I-PER"]))
    data = datasets.Dataset.from_dict(
        {"id": ["0"], "tokens": [["Jo", "Li", "ran"]], "ner_tags": [[1, 2, 0]]},
        features=datasets.Features(
            {"id": datasets.Value("string"), "tokens": datasets.Sequence(datasets.Value("string")), "ner_tags": tags}
        ),
    )
    (found,) = examples_of(TASKS["ner"], TASKS["ner"].hub, data, "x")
    assert found.columns["TEXT"] == "Jo Li ran" and found.target == [("PER", 0, 5)]


def test_a_column_that_the_hub_lacks_is_named():
    with pytest.raises(InputError, match="x has no column 'sentence'; its columns are text"):
        examples_of(TASKS["sst2"], TASKS["sst2"].hub, table({"text": ["a"]}), "x")


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match="cannot get 'no/such-set' from the Hugging Face hub") as caught:
        read_hub(TASKS["sst2"], "no/such-set", "train", lambda line: None)
    assert "\n" not in str(caught.value) and "give DATA= a folder" in str(caught.value)
