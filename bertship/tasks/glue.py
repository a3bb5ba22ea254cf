"""GLUE's tasks (Devlin et al. 2019, sections 4.1 and B.1): labels, files and settings of each."""

from bertship.tasks import sentence  # noqa: F401  registers their kinds
from bertship.tasks.base import Files, Hub, Task, register

_SPLITS = {"train": ("train.tsv",), "dev": ("dev.tsv",), "test": ("test.tsv",)}
_HUB_SPLITS = {"train": "train", "dev": "validation", "test": "test"}
_HUB = "nyu-mll/glue"
_TWO = {"TEXT": "sentence1", "TEXT_PAIR": "sentence2"}
_THREE_WAY = ("entailment", "neutral", "contradiction")

register(
    Task(
        name="sst2",
        kind="sentence",
        description="sentiment of a movie-review sentence (SST-2)",
        labels=("negative", "positive"),
        metrics=("accuracy",),
        files=Files(
            splits=_SPLITS,
            columns={"TEXT": "sentence"},
            labels={"0": "negative", "1": "positive"},
            folders=("SST-2",),
            rows={"train": 67_349, "dev": 872, "test": 1_821},
        ),
        hub=Hub(_HUB, "sst2", splits=_HUB_SPLITS, columns={"TEXT": "sentence"}),
        submission={"SST-2.tsv": "test"},
        packaged="reviews",
    )
)
register(
    Task(
        name="cola",
        kind="sentence",
        description="is the sentence acceptable English? (CoLA)",
        labels=("unacceptable", "acceptable"),
        metrics=("mcc", "accuracy"),
        files=Files(
            splits=_SPLITS,
            columns={"TEXT": 3},
            target=1,
            header=False,
            test_columns={"TEXT": "sentence"},
            labels={"0": "unacceptable", "1": "acceptable"},
            folders=("CoLA",),
            rows={"train": 8_551, "dev": 1_043, "test": 1_063},
        ),
        hub=Hub(_HUB, "cola", splits=_HUB_SPLITS, columns={"TEXT": "sentence"}),
        submission={"CoLA.tsv": "test"},
    )
)
register(
    Task(
        name="mrpc",
        kind="pair",
        description="do two sentences say the same? (MRPC)",
        labels=("not_equivalent", "equivalent"),
        metrics=("f1", "accuracy"),
        files=Files(
            splits={
                "train": ("train.tsv", "msr_paraphrase_train.txt"),
                "dev": ("dev.tsv", "msr_paraphrase_test.txt"),
                "test": ("test.tsv",),
            },
            columns={"TEXT": "#1 String", "TEXT_PAIR": "#2 String"},
            target="Quality",
            labels={"0": "not_equivalent", "1": "equivalent"},
            folders=("MRPC",),
            rows={"train": 3_668, "dev": 408, "test": 1_725},
        ),
        hub=Hub(_HUB, "mrpc", splits=_HUB_SPLITS, columns=_TWO),
        submission={"MRPC.tsv": "test"},
    )
)
register(
    Task(
        name="stsb",
        kind="regression",
        description="similarity of two sentences, 0 to 5 (STS-B)",
        metrics=("pearson", "spearman"),
        files=Files(
            splits=_SPLITS,
            columns=_TWO,
            target="score",
            folders=("STS-B",),
            rows={"train": 5_749, "dev": 1_500, "test": 1_379},
        ),
        hub=Hub(_HUB, "stsb", splits=_HUB_SPLITS, columns=_TWO),
        submission={"STS-B.tsv": "test"},
    )
)
register(
    Task(
        name="qqp",
        kind="pair",
        description="do two questions ask the same? (QQP)",
        labels=("not_duplicate", "duplicate"),
        metrics=("f1", "accuracy"),
        files=Files(
            splits=_SPLITS,
            columns={"TEXT": "question1", "TEXT_PAIR": "question2"},
            target="is_duplicate",
            labels={"0": "not_duplicate", "1": "duplicate"},
            ragged=True,
            folders=("QQP",),
            rows={"train": 363_849, "dev": 40_430, "test": 390_965},
        ),
        hub=Hub(_HUB, "qqp", splits=_HUB_SPLITS, columns={"TEXT": "question1", "TEXT_PAIR": "question2"}),
        submission={"QQP.tsv": "test"},
    )
)
register(
    Task(
        name="mnli",
        kind="pair",
        description="does the premise (TEXT) entail the hypothesis (TEXT_PAIR)? (MNLI)",
        labels=_THREE_WAY,
        metrics=("accuracy",),
        files=Files(
            splits={
                "train": ("train.tsv",),
                "dev": ("dev_matched.tsv", "dev.tsv"),
                "dev_mismatched": ("dev_mismatched.tsv",),
                "test": ("test_matched.tsv",),
                "test_mismatched": ("test_mismatched.tsv",),
            },
            columns=_TWO,
            target="gold_label",
            unlabelled=("-",),
            folders=("MNLI",),
            rows={"train": 392_702, "dev": 9_815, "dev_mismatched": 9_832, "test": 9_796, "test_mismatched": 9_847},
        ),
        hub=Hub(
            _HUB,
            "mnli",
            splits={
                "train": "train",
                "dev": "validation_matched",
                "dev_mismatched": "validation_mismatched",
                "test": "test_matched",
                "test_mismatched": "test_mismatched",
            },
            columns={"TEXT": "premise", "TEXT_PAIR": "hypothesis"},
        ),
        more_splits=("dev_mismatched",),
        submission={"MNLI-m.tsv": "test", "MNLI-mm.tsv": "test_mismatched"},
    )
)
register(
    Task(
        name="qnli",
        kind="pair",
        description="does the sentence (TEXT_PAIR) answer the question (TEXT)? (QNLI)",
        labels=("entailment", "not_entailment"),
        metrics=("accuracy",),
        files=Files(
            splits=_SPLITS,
            columns={"TEXT": "question", "TEXT_PAIR": "sentence"},
            folders=("QNLI",),
            rows={"train": 104_743, "dev": 5_463, "test": 5_463},
        ),
        hub=Hub(_HUB, "qnli", splits=_HUB_SPLITS, columns={"TEXT": "question", "TEXT_PAIR": "sentence"}),
        submission={"QNLI.tsv": "test"},
    )
)
register(
    Task(
        name="rte",
        kind="pair",
        description="does the text (TEXT) entail the hypothesis (TEXT_PAIR)? (RTE)",
        labels=("entailment", "not_entailment"),
        metrics=("accuracy",),
        files=Files(splits=_SPLITS, columns=_TWO, folders=("RTE",), rows={"train": 2_490, "dev": 277, "test": 3_000}),
        hub=Hub(_HUB, "rte", splits=_HUB_SPLITS, columns=_TWO),
        submission={"RTE.tsv": "test"},
    )
)
register(
    Task(
        name="wnli",
        kind="pair",
        description="is the pronoun resolved rightly? (WNLI; its dev split contradicts its training split)",
        labels=("not_entailment", "entailment"),
        metrics=("accuracy",),
        files=Files(
            splits=_SPLITS,
            columns=_TWO,
            labels={"0": "not_entailment", "1": "entailment"},
            folders=("WNLI",),
            rows={"train": 635, "dev": 71, "test": 146},
        ),
        hub=Hub(_HUB, "wnli", splits=_HUB_SPLITS, columns=_TWO),
        submission={"WNLI.tsv": "test"},
    )
)
register(
    Task(
        name="ax",
        kind="pair",
        description="GLUE's diagnostics: trained on MNLI, judged on phenomena (AX)",
        labels=_THREE_WAY,
        metrics=("mcc", "accuracy"),
        files=Files(
            splits={"train": ("train.tsv",), "dev": ("diagnostic-full.tsv",), "test": ("diagnostic.tsv",)},
            columns=_TWO,
            target="gold_label",
            aliases={"sentence1": ("Premise",), "sentence2": ("Hypothesis",), "gold_label": ("Label",)},
            unlabelled=("-",),
            folders=("diagnostic", "AX", "MNLI"),
            rows={"train": 392_702, "dev": 1_104, "test": 1_104},
        ),
        # the hub has the diagnostics without labels: there the dev split is MNLI's
        hub=Hub(
            _HUB,
            "mnli",
            splits={"train": "train", "dev": "validation_matched"},
            columns={"TEXT": "premise", "TEXT_PAIR": "hypothesis"},
        ),
        submission={"AX.tsv": "test"},
    )
)
