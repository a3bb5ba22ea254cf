"""Every built-in name from its data to a run and its evaluation, on the files that the repository has itself."""

import json

import pytest
from conftest import SETTINGS

from bertship.tasks import TASKS

QUICK = (*SETTINGS, "--set", "epochs=0.1", "--set", "min_updates=2")


@pytest.mark.parametrize("name", sorted(TASKS))
def test_finetune_and_evaluate(name, bertship, data, warm_start, tmp_path):
    given = ("--data", data / "sst2") if TASKS[name].packaged else ()
    common = ("--task", name, "--runs", tmp_path)
    code, out, err = bertship("--json", "finetune", *common, *given, "--init", warm_start, *QUICK)
    assert code == 0, err
    assert bool(given) or "made-up examples" in err
    trained = json.loads(out)["metrics"]
    code, out, err = bertship("--json", "evaluate", *common)
    assert code == 0, err
    found = json.loads(out)
    assert found["metrics"].keys() >= set(TASKS[name].metrics)
    assert all(trained[metric] == value for metric, value in found["metrics"].items())
    assert (tmp_path / "evaluate" / name / "default" / "report.html").is_file()
    assert (tmp_path / "finetune" / name / "default" / "report.html").is_file()
