"""The server answers what `bertship predict` answers, to the last bit, on the whole dev set of every exported run.

Minutes long, so marked slow. It takes the exports in `runs/`, or where BERTSHIP_RUNS says, with the data they were
trained on, and skips visibly without them.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from small_repository import serving

from bertship.artifacts import read_manifest
from bertship.errors import BertshipError
from bertship.tasks.base import Task
from serving import environment
from serving.check import check_answers, served_pipeline
from serving.repository import render
from train.data import load_examples

RUNS = Path(os.environ.get("BERTSHIP_RUNS", Path(__file__).parents[1] / "runs"))
EXPORTS = sorted(path.parent for path in (RUNS / "export").glob("*/task.json"))


def dev_set(export):
    task = Task.from_file(export / "task.json")
    try:
        run = read_manifest(RUNS / "finetune" / export.name / "default", "finetune")
        return task, load_examples(task, run["inputs"].get("data"), "dev", print)
    except BertshipError as error:
        pytest.skip(f"no dev set of {export.name}: {error}")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not EXPORTS, reason=f"no exports in {RUNS}")
@pytest.mark.parametrize("export", EXPORTS, ids=[path.name for path in EXPORTS])
def test_the_whole_dev_set(export, tmp_path):
    task, examples = dev_set(export)
    render(export, tmp_path / "repository")
    samples = [{"columns": {name: e.columns[name] for name in task.behaviour.inputs}} for e in examples]
    pipeline = served_pipeline(tmp_path / "repository", task.name)
    started = time.monotonic()
    with serving(environment.prepare(), tmp_path / "repository") as server, ThreadPoolExecutor(2) as pool:
        # two clients, over HTTP and gRPC, so that neighbours differ from one run to the next
        urls = (server.http_url, f"grpc://{server.grpc_url}")
        compared = [pool.submit(check_answers, pipeline, url, samples[i::2]) for i, url in enumerate(urls)]
        assert sum(each.result() for each in compared) == len(samples)
    print(f"{task.name}: {len(samples)} answers, equal to the last bit, in {time.monotonic() - started:.0f} s")
