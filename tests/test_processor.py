"""bertship/processor.py: an INT8 graph made on another processor is refused where it would compute something else."""

import json
from pathlib import Path

import pytest
from small_bert import make_model

from bertship import processor
from bertship.errors import InputError
from bertship.runners import OnnxRunner
from export import precision
from export.onnx_graph import export_onnx

VNNI = "flags\t\t: fpu avx2 avx512f avx512_vnni\n"
OLDER = "flags\t\t: fpu avx2 avx512f\n"
ARM = "Features\t: fp asimd asimddp\n"


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def pretend(cpuinfo: str | None) -> None:
        monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
        if cpuinfo is not None:
            (tmp_path / "cpuinfo").write_text(f"model name\t: A\n{cpuinfo}model name\t: A\n", encoding="utf-8")

    return pretend


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [(VNNI, True), ("flags : avx2 avx_vnni\n", True), ("flags : amx_int8\n", True), (OLDER, False), (ARM, False)],
)
def test_vnni_is_read_from_the_processor(flags: str, wanted: bool, pretend) -> None:
    pretend(flags)
    assert processor.has_vnni() is wanted


def test_there_may_be_no_cpuinfo(pretend) -> None:
    pretend(None)
    assert not processor.has_vnni()
    processor.check_int8(Path("m.onnx"), {processor.INT8: json.dumps({"weight_bits": 8})})


@pytest.mark.parametrize(("made_on", "refused"), [(VNNI, True), (OLDER, False)])
def test_a_graph_that_this_processor_would_compute_wrongly_is_refused(
    made_on: str, refused: bool, pretend, tmp_path: Path
) -> None:
    """A repository is made on one machine and served by another."""
    export_onnx(make_model("sentence"), tmp_path / "model.onnx")
    pretend(made_on)
    target = tmp_path / "model.int8.onnx"
    precision.to_int8(tmp_path / "model.onnx", target)
    for capable in (VNNI, ARM):
        pretend(capable)
        OnnxRunner(target, threads=1).close()
    pretend(OLDER)
    OnnxRunner(tmp_path / "model.onnx", threads=1).close()
    if refused:
        with pytest.raises(InputError, match=r"model\.int8\.onnx is INT8 with weights of 8 bits.*--precision fp32"):
            OnnxRunner(target, threads=1)
    else:
        OnnxRunner(target, threads=1).close()
