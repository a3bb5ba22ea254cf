"""Every command and snippet of every page is run, here or in a named test, or is listed with what it would need."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_docs import DOCS, PAGES, ROOT, SHELL, Block, blocks, clone, environment, until_it_serves  # noqa: F401

from bertship.config import EncoderConfig, read_encoder_config
from bertship.tasks import TASKS
from bertship.tokenization import Tokenizer
from train.checkpoint import save_model
from train.heads import PretrainingModel

# pages that are run elsewhere, whole
RUN_BY = {
    "quickstart.md": "test_docs.py",
    "index.md": "test_docs.py",
    "architecture.md": "test_docs.py",
    "playground.md": "test_docs.py",
    "troubleshooting.md": "test_docs.py",
    "client.md": "test_docs_serving.py",
}
# pages that are run here, in the order of the line
HERE = (
    "corpus.md",
    "pretraining.md",
    "tasks.md",
    "finetuning.md",
    "own-labels.md",
    "export.md",
    "performance.md",
    "serving.md",
    "operations.md",
    "reports.md",
    "peers.md",
    "kubernetes.md",
)
# how a command or snippet begins, and what it would need
NEEDS = {
    "bertship corpus 'hub:bookcorpus": "network: the hub",
    "from datatrove.executor import SlurmPipelineExecutor": "a Slurm cluster",
    "from datatrove.executor import RayPipelineExecutor": "a Ray cluster",
    "make finetune TASK=mnli DATA=glue GPUS=8": "eight GPUs; two processes are in test_finetune_distributed.py",
    "torchrun --nproc-per-node 8": "eight GPUs; two processes are in test_finetune_distributed.py",
    "make pretrain PRESET=base GPUS=8": "eight GPUs; two processes without one are in test_distributed.py",
    ".venv/bin/torchrun --nnodes 4": "four machines; the launcher is in test_distributed.py",
    "sbatch --nodes 4": "a Slurm cluster",
    "make plan TASK=squad CONTAINER=": "a GPU and a container engine; test_plan.py has stand-ins",
    "make gpu-check TASK=squad CONTAINER=": "a GPU and a container engine; test_gpu_check.py has stand-ins",
    "docker build": "a container engine; test_deploy_files.py has linters",
    "docker compose": "a container engine; test_deploy_files.py has linters",
    "kubectl apply": "a cluster; test_deploy_files.py has schemas",
    "make bench-peers": "network: the peers' packages; test_peers.py has stand-ins",
    "make demo": "minutes; test_demo.py runs it",
    "make test": "it is this",
}


def statements(block: Block) -> list[str]:
    """A shell snippet's commands, each with the lines that it goes on in; a program is one statement."""
    if block.language != "bash":
        return [block.code]
    found: list[str] = []
    waiting = ""
    for line in block.code.splitlines():
        waiting = f"{waiting}\n{line}" if waiting else line
        try:
            shlex.split(waiting, comments=True)
        except ValueError:  # within quotes
            continue
        if not waiting.strip() or waiting.endswith("\\"):
            continue
        if not waiting.lstrip().startswith("#"):
            found.append(waiting)
        waiting = ""
    return found


def needs(statement: str) -> str | None:
    return next((start for start in NEEDS if statement.lstrip("# \n").startswith(start)), None)


def programs(page: str) -> list[Block]:
    return [block for block in blocks(page) if block.language in ("bash", "python")]


def readme() -> list[Block]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return [Block("README.md", "bash", "", code, 0) for code in re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S)]


def test_every_page_is_run_or_says_why_not():
    assert {page for page in PAGES if programs(page)} == {*RUN_BY, *HERE}
    every = [s for page in PAGES for block in programs(page) for s in statements(block)]
    every += [s for block in readme() for s in statements(block)]
    unused = [start for start in NEEDS if not any(needs(s) == start for s in every)]
    assert not unused, f"no page has {unused} any more"


def test_statements_are_found():
    code = "a 'b\nc' # d's\n# a remark\n\nmake x \\\n  Y=1\nlast\n"
    assert statements(Block("x.md", "bash", "", code, 1)) == ["a 'b\nc' # d's", "make x \\\n  Y=1", "last"]


@pytest.fixture
def place(clone, environment, line, warm_start, data):  # noqa: F811
    """A clone with what the pages name: small texts, models of the line's test, a `bertship` made short."""
    text = "\n\n".join(f"It was warm in the {word}. We went there. Nobody was at home." for word in "abcdefgh" * 9)
    documents = [f'{{"text": "{part}"}}' for part in text.split("\n\n")]
    for folder in ("books", "wiki", "bin", "path/to", "glue"):
        (clone / folder).mkdir(parents=True)
    (clone / "books" / "one.txt").write_text(text)
    (clone / "documents.jsonl").write_text("\n".join(documents) + "\n")
    subprocess.run(["zstd", "-q", "-o", clone / "wiki" / "a.jsonl.zst", clone / "documents.jsonl"], check=False)
    if not (clone / "wiki" / "a.jsonl.zst").is_file():
        import zstandard

        packed = zstandard.ZstdCompressor().compress((clone / "documents.jsonl").read_bytes())
        (clone / "wiki" / "a.jsonl.zst").write_bytes(packed)
    tokenizer = Tokenizer.from_dir(warm_start)
    sizes = read_encoder_config(warm_start).model_dump() | {"num_hidden_layers": 4}  # concat_last_four wants four
    (clone / "start").mkdir()
    save_model(PretrainingModel(EncoderConfig(**sizes)), tokenizer, clone / "start")
    shutil.copytree(warm_start, clone / "path" / "to" / "bert")
    for folder in ("finetune/sst2", "finetune/mnli", "finetune/squad", "export/sst2", "export/squad"):
        shutil.copytree(line.runs / folder, clone / "runs" / folder)
    shutil.copytree(line.runs / "finetune" / "sst2" / "default" / "model", clone / "path" / "to" / "model")
    samples = ROOT / "bertship" / "tasks" / "samples"
    shutil.copytree(samples / "rte", clone / "glue" / "RTE")
    tests = {"RTE": ("test.tsv", "sentence1\tsentence2"), "SST-2": ("test.tsv", "sentence")}
    tests |= {
        "MNLI": ("test_matched.tsv", "sentence1\tsentence2"),
        "diagnostic": ("diagnostic.tsv", "sentence1\tsentence2"),
    }
    for folder, (name, header) in tests.items():
        (clone / "glue" / folder).mkdir(exist_ok=True)
        columns = header.count("\t") + 1
        rows = [f"index\t{header}", *("\t".join([str(i), *["it was warm"] * columns]) for i in range(3))]
        (clone / "glue" / folder / name).write_text("\n".join(rows) + "\n")
    (clone / "glue" / "MNLI" / "test_mismatched.tsv").write_text(
        (clone / "glue" / "MNLI" / "test_matched.tsv").read_text()
    )
    for name, task in re.findall(
        r"^```toml\n# (\w+\.toml)\n(.*?)^```", (DOCS / "own-labels.md").read_text(), re.M | re.S
    ):
        (clone / name).write_text(task)
    (clone / "path" / "to" / "folder").mkdir()
    for split, count in (("train", 24), ("dev", 8)):
        rows = [f"{('billing', 'other')[i % 2]},{split} says {('pay', 'help')[i % 2]} {i}" for i in range(count)]
        (clone / "path" / "to" / "folder" / f"{split}.csv").write_text("label,message\n" + "\n".join(rows) + "\n")
    variables, _ = environment
    short = clone / "bin" / "bertship"
    short.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ROOT / "tests" / "docs_shim.py"}" "$@"\n')
    short.chmod(0o755)
    variables = {**variables, "PATH": f"{clone / 'bin'}{os.pathsep}{variables['PATH']}", "PYTHONPATH": str(clone)}
    variables |= {"SHORT": str(short), "SERVER_URL": line.server.http_url}
    del variables["INIT"]  # pre-training would go on from it; fine-tuning is given `start` by the shim
    return clone, variables, line


MAKE = SHELL.replace("command make", 'command make BERTSHIP="$SHORT"')


@pytest.mark.slow
def test_commands_and_programs_of_the_pages(place):
    home, variables, line = place
    failed = []
    subprocess.run([home / "bin" / "bertship", "repository"], cwd=home, env=variables, check=True, capture_output=True)
    try:
        for page in HERE:
            subprocess.run(
                [home / "bin" / "bertship", "stop"], cwd=home, env=variables, check=True, capture_output=True
            )
            for block in programs(page):
                for statement in statements(block):
                    if not needs(statement):
                        failed += run(block, prepared(block, statement, home, line), home, variables)
                        after(statement, home)
    finally:
        subprocess.run([home / "bin" / "bertship", "stop"], cwd=home, env=variables, check=False, capture_output=True)
    assert not failed, "\n\n".join(failed)
    assert (home / "runs" / "parity" / "squad" / "report.html").is_file()
    assert (home / "runs" / "compare" / "finetune" / "report.html").is_file()
    assert (home / "glue.zip").is_file() and (home / "runs" / "finetune" / "rte" / "default.sweep").is_dir()


def prepared(block: Block, statement: str, home: Path, line) -> str:
    """The statement with this test's places: its server for the usual one, its folders for shared ones."""
    statement = statement.replace("127.0.0.1:8000", line.server.http_url.removeprefix("http://"))
    statement = statement.replace("127.0.0.1:8001", line.server.grpc_url).replace(".venv/bin/bertship", "bertship")
    if block.language == "python":
        shared = home / "shared"
        if "/shared/books" in statement:
            shared.mkdir(exist_ok=True)
            shutil.copytree(home / "books", shared / "books", dirs_exist_ok=True)
        statement = statement.replace('"/shared', f'"{shared}').replace("30_522", "256")
    return statement


def after(statement: str, home: Path) -> None:
    """What the reader would do between two commands of a page."""
    if statement.startswith("bertship serve --detach"):
        return
    if "bench-engine runs/export/sst2" in statement:  # a measurement kept, and one of another kind of run
        shutil.copytree(home / "runs/finetune/sst2/default", home / "runs/finetune/sst2/seed1", dirs_exist_ok=True)
        for name in ("sst2", "sst2.before"):
            shutil.copytree(home / "runs/bench-engine/sst2", home / "runs/bench" / name, dirs_exist_ok=True)


def run(block: Block, statement: str, home: Path, variables: dict[str, str]) -> list[str]:
    """What went wrong, in words; nothing where nothing did."""
    if block.language == "python":
        (home / "program.py").write_text(statement)
        command = [sys.executable, "program.py"]
    else:
        command = ["bash", "-c", f"{MAKE}{statement}"]
        if re.match(r"bertship serve\s*(#|$)", statement):  # in the foreground, until Ctrl-C
            started = subprocess.Popen(
                [*command[:2], f"{SHELL}exec {statement}"], cwd=home, env=variables, stdout=subprocess.PIPE, text=True
            )
            ready = started.stdout.readline()
            started.terminate()
            code = started.wait(timeout=60)
            return [] if ready.startswith("ready: ") and code == 0 else [f"{block}\n{statement}\n{ready} {code}"]
    done = subprocess.run(command, cwd=home, env=variables, capture_output=True, text=True, timeout=300, check=False)
    warned = "task check" in statement and done.returncode == 1 and "would spoil a training" in done.stderr
    return [] if done.returncode == 0 or warned else [f"{block}\n{statement}\n{done.stdout}\n{done.stderr}"]


def test_the_tasks_of_the_pages_are_there():
    """What `make finetune TASK=rte DATA=glue` needs of the samples."""
    assert "RTE" in TASKS["rte"].files.folders
