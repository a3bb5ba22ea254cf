"""What this machine has, and which precision on which engine follows from it."""

import contextlib
import dataclasses
import importlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import onnxruntime

from bertship.cuda import find_device
from bertship.errors import InputError
from bertship.processor import has_vnni


@dataclass(frozen=True)
class Machine:
    """`gpu` and `compute_capability` are empty without a GPU and driver, `tensorrt` without a TensorRT that imports."""

    vnni: bool
    gpu: str = ""
    compute_capability: str = ""
    tensorrt: str = ""  # its version
    onnxruntime_cuda: bool = False

    @property
    def builds_plans(self) -> bool:
        return bool(self.gpu and self.tensorrt)

    def without_gpu(self) -> "Machine":
        return Machine(self.vnni)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Choice:
    """A precision, the engine that runs it ("tensorrt", "onnxruntime cuda" or "onnxruntime cpu"), and the reason."""

    precision: str
    engine: str
    why: str

    def as_dict(self) -> dict[str, str]:
        return dataclasses.asdict(self)


def find_machine() -> Machine:
    """Ask the processor, the driver and the installed packages."""
    gpu = capability = tensorrt = ""
    with contextlib.suppress(InputError):
        device = find_device()
        gpu, capability = device.name, device.compute_capability
    if gpu:
        with contextlib.suppress(ImportError):
            tensorrt = importlib.import_module("tensorrt").__version__
    cuda = bool(gpu) and "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    return Machine(has_vnni(), gpu, capability, tensorrt, cuda)


def choose(machine: Machine, made: Sequence[str], plans: Collection[str]) -> Choice:
    """The best of the precisions that were `made` and passed the gate; `plans` are those of passed TensorRT plans."""
    if machine.gpu and "fp16" in plans:
        return Choice("fp16", "tensorrt", f"TensorRT {machine.tensorrt} built a plan for {machine.gpu}")
    if machine.gpu and machine.onnxruntime_cuda and "fp16" in made:
        return Choice(
            "fp16", "onnxruntime cuda", f"ONNX Runtime has CUDA for {machine.gpu}, and no TensorRT plan is here"
        )
    unused = f"; {machine.gpu} stays unused without TensorRT or onnxruntime-gpu" if machine.gpu else ""
    if machine.vnni and "int8" in made:
        return Choice("int8", "onnxruntime cpu", f"this processor adds INT8 products in 32 bits (VNNI or AMX){unused}")
    if "fp32" in made:
        reason = (
            "int8 was not made or did not pass"
            if machine.vnni
            else "without VNNI, INT8 has 7-bit weights, and its speed was not measured"
        )
        return Choice("fp32", "onnxruntime cpu", f"{reason}, and processors compute FP16 in FP32{unused}")
    return Choice(made[0], "onnxruntime cpu", f"of {', '.join(made)}, which were made, it is the first{unused}")
