"""export/plan.py and the export's own plan, with a stand-in for TensorRT: what is built, judged, published, refused."""

import errno
import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from fake_tensorrt import FakeCuda, fake_tensorrt, write_plan
from small_bert import TASKS_BY_HEAD, make_examples, make_run
from test_parity import edit, matrices

from bertship import artifacts, cuda
from bertship.errors import CheckFailed, InputError
from bertship.tensorrt_runner import TensorRTRunner
from export import plan, publish
from export.machine import Machine
from export.plan import PLANS, make_plans
from export.source import from_run
from export.tensorrt_engine import profiles_of

ROOT = Path(__file__).parents[1]
GPU = Machine(True, "NVIDIA H200", "9.0", "10.16.1.11")


def silent(line: str) -> None: ...


@pytest.fixture(scope="module", params=TASKS_BY_HEAD)
def export(request, tmp_path_factory):
    """A head's export in FP32 and FP16, made without a GPU."""
    folder = tmp_path_factory.mktemp(request.param)
    run = make_run(folder / "run", request.param)
    publish.export_run(run, folder / "export", ["fp32", "fp16"], make_examples(request.param), silent)
    return folder / "export", TASKS_BY_HEAD[request.param]


@pytest.fixture
def builder(monkeypatch):
    """Plans that are the graph itself; `spoil` changes what is built."""
    state = {"spoil": None, "built": []}

    def build(graph, target, task, trt=None, *, timing_cache=None, workspace_mib=1024, report=silent):
        source = graph
        if state["spoil"] is not None:
            import onnx

            model = onnx.load(graph)
            state["spoil"](model.graph)
            source = graph.with_name("spoilt.onnx")
            onnx.save(model, source)
        kept = graph.parent.parent / f"built-{len(state['built'])}.onnx"  # a plan holds its weights itself
        kept.write_bytes(source.read_bytes())
        write_plan(target, kept, profiles_of(task))
        state["built"].append((graph.name, timing_cache, workspace_mib))
        return {
            "file": target.name,
            "sha256": artifacts.sha256_file(target),
            "bytes": target.stat().st_size,
            "version": "10.16.1.11",
            "compute_capabilities": ["9.0"],
            "gpu": "NVIDIA H200",
            "driver_cuda": "12.8",
            "inputs": ["input_ids", "attention_mask", "token_type_ids"],
            "outputs": [spec.name for spec in task.behaviour.logits(task)],
            "profiles": [shapes._asdict() for shapes in profiles_of(task)],
        }

    monkeypatch.setattr(plan, "build_engine", build)
    return state


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def halve_values(graph):
    edit(matrices(graph)[2], lambda w: w.__imul__(0.5))


def test_plans_are_added_to_an_export_that_was_made_elsewhere(export, builder):
    out, task = export
    before = artifacts.read_manifest(out)
    manifest = make_plans(out, silent, 512, trt=fake_tensorrt(), cuda=FakeCuda())
    assert manifest == artifacts.read_manifest(out, "export")
    assert manifest["plans"]["fp16"]["file"] == PLANS["fp16"] == "model.plan"
    assert manifest["best"]["engine"] == "tensorrt" and "NVIDIA H200" in manifest["best"]["why"]
    assert set(manifest["files"]) == set(before["files"]) | {"model.plan"}
    assert artifacts.is_current(out, before["fingerprint"])  # `bertship export` keeps it
    assert [facts["largest"][1] for facts in manifest["plans"]["fp16"]["profiles"]] == list(task.buckets)
    assert all(r["engine"] == "tensorrt" and r["artifact_metric"] is None for r in manifest["plan_parity"])
    assert [r["mode"] for r in manifest["plan_parity"]] == [*(f"padded to {n}" for n in task.buckets), "alone"]
    ((graph, cache, workspace),) = builder["built"]
    assert (graph, workspace) == ("model.fp16.onnx", 512)
    assert cache is not None and cache.parent == out.parent  # not in the export: it is no artifact
    runner = TensorRTRunner(out / "model.plan", manifest["plans"]["fp16"], trt=fake_tensorrt(), cuda=FakeCuda())
    runner.warm_up([1, task.max_tokens])


def test_building_plans_takes_no_pytorch():
    """NVIDIA's TensorRT image has none."""
    code = "import sys; sys.modules['torch'] = None; import export.plan, bertship.cli; print('fine')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "fine\n", done.stderr


def test_a_plan_that_departs_is_not_published(export, builder):
    out, _ = export
    before = contents(out)
    builder["spoil"] = halve_values
    with pytest.raises(CheckFailed, match=r"fp16 \(padded to \d+\): .*is as it was") as caught:
        make_plans(out, silent, trt=fake_tensorrt(), cuda=FakeCuda())
    assert "\n" not in str(caught.value)
    assert contents(out) == before


def test_a_plan_for_another_gpu_than_this_is_not_published(export, builder):
    out, _ = export
    before = contents(out)
    with pytest.raises(CheckFailed, match=r"built for compute capability 9\.0"):
        make_plans(out, silent, trt=fake_tensorrt(), cuda=FakeCuda((8, 6)))
    assert contents(out) == before


def test_without_a_graph_for_it_or_tensorrt_one_line_says_so(export, tmp_path, bertship, monkeypatch):
    out, _ = export
    manifest = artifacts.read_manifest(out)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"graphs": {"fp32": "model.onnx"}}), "utf-8")
    with pytest.raises(InputError, match="has no graph for TensorRT; export it with --precision fp32,fp16"):
        make_plans(tmp_path, silent)
    before = contents(out)
    code, _, err = bertship("plan", out)
    assert code == 2 and err.splitlines()[-1].startswith("error: ")
    assert contents(out) == before


def test_what_a_plan_takes_is_asked_for_before_anything_is_computed(export, bertship, monkeypatch):
    """TensorRT for RTX, which tests have, is no TensorRT: no server loads its plans."""
    out, _ = export
    before = contents(out)
    monkeypatch.setattr(plan, "Reference", lambda *_, **__: pytest.fail("the FP32 graph was run"))

    def no_driver():
        raise InputError("no driver")

    monkeypatch.setitem(sys.modules, "tensorrt", None)
    code, _, err = bertship("plan", out)
    assert code == 2 and "Python package tensorrt is not installed here" in err and f"`bertship plan {out}`" in err
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt())
    monkeypatch.setattr(cuda, "load_driver", no_driver)
    code, _, err = bertship("plan", out)
    assert (code, err) == (2, "error: no driver\n")
    for mib in (0, -5):
        code, _, err = bertship("plan", out, "--workspace-mib", mib)
        assert code == 2 and f"a workspace of {mib} MiB is too small" in err
    assert contents(out) == before


def test_an_export_that_was_made_again_meanwhile_stays(export, builder):
    out, _ = export
    made = (out / "manifest.json").read_text("utf-8")

    def export_again(graph):
        (out / "manifest.json").write_text(made + " ", "utf-8")

    builder["spoil"] = export_again
    try:
        with pytest.raises(InputError, match="was made again while its plan was built"):
            make_plans(out, silent, trt=fake_tensorrt(), cuda=FakeCuda())
        assert (out / "manifest.json").read_text("utf-8") == made + " "
    finally:
        (out / "manifest.json").write_text(made, "utf-8")


def test_a_file_system_without_links_takes_copies(export, builder, monkeypatch):
    out, _ = export

    def refuse(source, target):
        raise PermissionError(errno.EPERM, "Operation not permitted", str(source))

    monkeypatch.setattr(plan.os, "link", refuse)
    manifest = make_plans(out, silent, trt=fake_tensorrt(), cuda=FakeCuda())
    artifacts.check_files(out, manifest, manifest["files"])


@pytest.mark.parametrize("departs", [False, True])
def test_an_export_on_the_gpus_machine_brings_its_plan(tmp_path, builder, monkeypatch, departs):
    """And where the plan alone departs, `auto` leaves it out and says so."""
    monkeypatch.setattr(plan, "TensorRTRunner", functools.partial(_open, fake_tensorrt(), FakeCuda()))
    builder["spoil"] = halve_values if departs else None
    run, out, said = make_run(tmp_path / "run", "sentence"), tmp_path / "export", []
    arguments = (from_run(run), out, ["fp32", "fp16"], make_examples("sentence"), said.append)
    if departs:
        with pytest.raises(CheckFailed, match="nothing was published"):
            publish.export_source(*arguments, machine=GPU)
        assert not out.exists()
    manifest = publish.export_source(*arguments, lenient=True, machine=GPU)
    assert (out / "model.plan").is_file() is not departs
    assert list(manifest["plans"]) == ([] if departs else ["fp16"])
    assert ("model.plan" in manifest["refused"]) is departs
    assert manifest["best"]["engine"] == ("onnxruntime cpu" if departs else "tensorrt")
    assert manifest["serve"] == "fp32"  # of what was made; the embedded server has no GPU
    assert artifacts.is_current(out, manifest["fingerprint"])
    assert any("WARNING" in line and "model.plan" in line for line in said) is departs


def _open(module, driver, path, facts, rebuild="bertship plan EXPORT_DIR", **given):
    return TensorRTRunner(path, facts, rebuild, trt=module, cuda=driver)
