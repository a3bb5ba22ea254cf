"""The served part runs with numpy, tokenizers and onnxruntime alone; importing the package imports nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from bertship.tasks import TASKS

ROOT = Path(__file__).parents[1]
PREPARE = """
import sys, types

class Block:
    ALLOWED = {"bertship", "numpy", "tokenizers", "onnxruntime", "triton_python_backend_utils"}
    refused = []

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in self.ALLOWED or top in sys.stdlib_module_names or top.startswith("_"):
            return None
        # numpy and onnxruntime try some optional ones themselves
        self.refused.append(name)
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
stub = types.ModuleType("triton_python_backend_utils")
class TritonModelException(Exception): pass
stub.TritonModelException = TritonModelException
class MetricFamily:
    COUNTER = 0
    def __init__(self, **what): pass
    def Metric(self, labels): return self
stub.MetricFamily = MetricFamily
sys.modules["triton_python_backend_utils"] = stub
"""
HEAVY = """
heavy = {"torch", "transformers", "pydantic", "tritonclient", "typer", "rich", "sklearn", "scipy",
         "train", "export", "serving"}
found = heavy & {name.partition(".")[0] for name in sys.modules}
assert not found, found
assert not heavy & {name.partition(".")[0] for name in Block.refused}, Block.refused
"""


def run(code):
    return subprocess.run(
        [sys.executable, "-c", PREPARE + code + HEAVY],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_importing_the_package_imports_nothing():
    done = run("before = set(sys.modules)\nimport bertship\nprint(sorted(set(sys.modules) - before))\n")
    assert done.returncode == 0, done.stderr
    assert not {"numpy", "tokenizers", "onnxruntime"} & set(eval(done.stdout))


SERVED = """
import json, tempfile
from pathlib import Path
import bertship.triton_steps as steps
import numpy as np
from bertship.pipeline import Pipeline
from bertship.tasks import TASKS, Task, get_task
from bertship.tokenization import SPECIAL_TOKENS, Tokenizer, pad

with tempfile.TemporaryDirectory() as folder:
    folder = Path(folder)
    (folder / "1").mkdir()
    (folder / "1" / "task.json").write_text(get_task("squad").to_json())
    tokenizer = Tokenizer.from_vocab([*SPECIAL_TOKENS, *"abc"], lowercase=True)
    tokenizer.save(folder / "1")
    step = steps.TokenizeStep()
    config = {"parameters": {"max_rows": {"string_value": "8"}}}
    step.initialize({"model_repository": str(folder), "model_version": "1", "model_config": json.dumps(config)})
    assert step.task == TASKS["squad"]

def runner(rows):
    return {s.name: [np.zeros([len(r) if d == -1 else d for d in s.dims]) for r in rows] for s in specs}

for task in TASKS.values():
    if task.behaviour.needs_labels and not task.labels:
        task = task.with_labels(("O", "B-X", "I-X"))
    specs = task.behaviour.logits(task)
    texts = {s.name: ["a b"] if len(s.dims) == 1 else [["a b", "c"]] for s in task.behaviour.request()}
    Pipeline(task, tokenizer, runner)(texts)
print(len(TASKS))
"""


def test_the_served_part_needs_three_libraries():
    done = run(SERVED)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(len(TASKS))


@pytest.mark.parametrize("module", ["torch", "pydantic", "serving.repository", "typer"])
def test_the_block_blocks(module):
    done = run(f"import {module}\n")
    assert done.returncode == 1 and "ModuleNotFoundError" in done.stderr


def test_names_of_the_package():
    import bertship

    assert bertship.Client.__module__ == "bertship.client"
    assert bertship.Pipeline.__module__ == "bertship.pipeline"
    with pytest.raises(AttributeError, match="has no attribute 'Clients'"):
        _ = bertship.Clients
    assert set(bertship.__all__) == {"AsyncClient", "Client", "Pipeline", "__version__"}


UNEXPECTED = """
import bertship.triton_steps as steps

class Broken(steps._Step):
    def execute(self, requests):
        return [{}[request] for request in requests]

try:
    Broken().execute(["confidential"])
except TritonModelException as error:
    print(error, error.__cause__, error.__context__)
"""


def test_an_unexpected_exception_takes_no_text_into_the_server_s_log():
    done = run(UNEXPECTED)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("KeyError at <string>:") and "confidential" not in done.stdout
