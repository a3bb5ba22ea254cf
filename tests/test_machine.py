"""export/machine.py: what is found, and what follows from it."""

import types

import pytest
from fake_tensorrt import FakeCuda, fake_tensorrt

from bertship import cuda
from export import machine
from export.machine import Machine, choose, find_machine

ALL = ("fp32", "fp16", "int8")
H200 = "NVIDIA H200"


@pytest.mark.parametrize(
    ("found", "made", "plans", "wanted", "says"),
    [
        (Machine(True), ALL, (), ("int8", "onnxruntime cpu"), "VNNI"),
        (Machine(False), ALL, (), ("fp32", "onnxruntime cpu"), "without VNNI"),
        (Machine(True), ("fp32", "fp16"), (), ("fp32", "onnxruntime cpu"), "int8 was not made or did not pass"),
        (Machine(False), ("fp16", "int8"), (), ("fp16", "onnxruntime cpu"), "it is the first"),
        (Machine(True, H200, "9.0", "10.16.1", True), ALL, ("fp16",), ("fp16", "tensorrt"), "TensorRT 10.16.1"),
        (Machine(True, H200, "9.0", "10.16.1", True), ALL, (), ("fp16", "onnxruntime cuda"), "no TensorRT plan"),
        (Machine(True, H200, "9.0"), ALL, (), ("int8", "onnxruntime cpu"), "NVIDIA H200 stays unused without"),
    ],
)
def test_the_best_precision_follows_from_the_machine(found, made, plans, wanted, says):
    choice = choose(found, made, plans)
    assert (choice.precision, choice.engine) == wanted
    assert says in choice.why


def test_a_machine_without_a_driver_has_no_gpu(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(cuda.ctypes, "CDLL", missing)
    monkeypatch.setattr(machine, "has_vnni", lambda: True)
    assert find_machine() == Machine(True)


@pytest.mark.parametrize("installed", [True, False])
def test_a_gpu_and_what_is_installed_for_it_are_found(monkeypatch, installed):
    def load(name):
        if not installed:
            raise ImportError(name)
        return fake_tensorrt("11.4.0.106")

    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"] if installed else ["CPUExecutionProvider"]
    monkeypatch.setattr(machine, "find_device", lambda: cuda.find_device(FakeCuda()))
    monkeypatch.setattr(machine, "has_vnni", lambda: False)
    monkeypatch.setattr(machine.importlib, "import_module", load)
    monkeypatch.setattr(machine, "onnxruntime", types.SimpleNamespace(get_available_providers=lambda: providers))
    found = find_machine()
    assert found == Machine(False, H200, "9.0", "11.4.0.106" if installed else "", installed)
    assert found.builds_plans is installed
