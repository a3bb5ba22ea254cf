"""The commands one after another, as the Make targets run them: pre-train and fine-tune; serve, ask, load and stop."""

import html
import json
from pathlib import Path

import psutil
import pytest
from conftest import PLACES, SETTINGS

from bertship.shell import typed

PRESET = """
[model]
hidden_size = 32
num_hidden_layers = 2
num_attention_heads = 2
intermediate_size = 64

[pretrain]
steps = 20
batch_size = 8
sequence_length = 32
warmup_steps = 2
heldout_batches = 2
precision = "fp32"
"""


def test_pretrain_then_finetune_starts_from_the_own_run(bertship, data, tmp_path):
    documents = "\n\n".join(f"We went to the {p}. It was a {p} like any other. Then we left." for p in PLACES * 5)
    (tmp_path / "documents.txt").write_text(documents, encoding="utf-8")
    (tmp_path / "own.toml").write_text(PRESET, encoding="utf-8")
    runs = ("--runs", tmp_path / "runs")
    assert bertship("corpus", tmp_path / "documents.txt", *runs, "--set", "vocab_size=128")[0] == 0
    said = (tmp_path / "runs" / "corpus" / "default" / "NEXT.md").read_text(encoding="utf-8")
    assert f"{typed('bertship pretrain')} --preset tiny --corpus default --runs {tmp_path / 'runs'}\n" in said
    code, out, err = bertship("--json", "pretrain", "--preset", tmp_path / "own.toml", *runs)
    assert code == 0, err
    page = html.unescape((tmp_path / "runs" / "pretrain" / "default" / "report.html").read_text(encoding="utf-8"))
    assert f"bertship finetune --task sst2 --init {tmp_path / 'runs' / 'pretrain' / 'default'} " in page
    metrics = json.loads(out)["metrics"]
    assert metrics["after"]["mlm_loss"] < metrics["before"]["mlm_loss"]
    common = ("--task", "sst2", "--data", data / "sst2", *runs)
    code, out, err = bertship("--json", "finetune", *common, "--preset", tmp_path / "own.toml", *SETTINGS)
    assert code == 0, err
    assert f"starting from the pre-training run {tmp_path / 'runs' / 'pretrain' / 'default'}" in err
    assert json.loads(out)["inputs"]["init"] == str(tmp_path / "runs" / "pretrain" / "default")
    assert "is made anew" not in err
    code, _, err = bertship("finetune", *common, "--preset", tmp_path / "own.toml", *SETTINGS, "--set", "seed=7")
    assert code == 0 and "sst2/default (accuracy 0." in err and "is made anew, as what goes in differs" in err
    code, _, err = bertship(
        "finetune", *common, "--preset", tmp_path / "own.toml", *SETTINGS, "--set", "seed=7", "--force"
    )
    assert code == 0 and "is made anew, as --force asks for it" in err
    page = html.unescape(
        (tmp_path / "runs" / "finetune" / "sst2" / "default" / "report.html").read_text(encoding="utf-8")
    )
    assert f"bertship export --task sst2 --runs {tmp_path / 'runs'}</pre>" in page


def test_serve_ask_stop(line, bertship, tmp_path):
    ports = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
    code, out, err = bertship(
        "--json", "serve", "--repository", line.repository, "--runs", tmp_path, *ports, "--detach"
    )
    assert code == 0, err
    state = json.loads(out)
    try:
        question = ("--question", "Where did Anna go?", "--context", "Anna went to the market today.")
        code, out, err = bertship("--json", "ask", "--task", "squad", "--runs", tmp_path, *question)
        assert code == 0, err
        assert json.loads(out)["answers"][0]["ANSWER"] == "market"
        code, out, err = bertship(
            "ask", "--task", "ner", "--url", f"grpc://{state['grpc_url']}", "--text", "Bruno left"
        )
        assert code == 0 and '"ENTITIES"' in out, err
        code, _, err = bertship("serve", "--repository", line.repository, "--runs", tmp_path, *ports, "--detach")
        assert code == 2 and "already runs" in err and "`bertship deploy runs/export/TASK`" in err
        assert bertship("health", "--runs", tmp_path)[0] == 0, "the same server"
        code, out, err = bertship("ask", "--task", "sst2", "--runs", tmp_path, "--text", "a lovely film")
        assert set(json.loads(out)["PROBABILITIES"]) == {"negative", "positive"}, err
    finally:
        stopped = bertship("stop", "--runs", tmp_path)
    assert stopped == (0, "stopped\n", "")
    assert not psutil.pid_exists(state["pid"])
    assert not list(Path("/dev/shm").glob(f"{state['shm_prefix']}*"))
    assert bertship("stop", "--runs", tmp_path) == (0, "no server was running\n", "")


@pytest.mark.parametrize("task", ["squad", "sst2"])
def test_bench_compares_the_answers_and_measures(line, bertship, task):
    arguments = ("--concurrency", "2", "--protocol", "http", "--seconds", "1", "--repository", line.repository)
    code, out, err = bertship("--json", "bench", "--task", task, "--runs", line.runs, *arguments)
    assert code == 0, err
    assert "40 answers of version 1 compared with `predict` on its files: equal to the last bit" in err
    (row,) = json.loads(out)["rows"]
    assert row["concurrency"] == 2
    assert (line.runs / "bench" / task / "bench.csv").is_file()


def test_params_are_the_published_counts(bertship):
    for preset, encoder in (("base", 109_482_240), ("large", 335_141_888)):
        code, out, _ = bertship("--json", "params", preset)
        counts = json.loads(out)
        assert (code, counts["encoder"]) == (0, encoder)
        assert counts["estimate"] == pytest.approx(encoder, rel=0.02)
    code, out, _ = bertship("params", "tiny", "--vocab-size", "8192")
    assert code == 0 and f"{8192 * 128 + 2 * 12 * 128**2:,}" in out
    code, _, err = bertship("params", "huge")
    assert code == 2 and "unknown preset 'huge'" in err
