"""A TensorRT plan behind the call of every engine: rows in, logits out.

A plan holds its kernels for a few ranges of shapes, the profiles. A batch runs in the first profile that it fits, each
of which has a context of its own. Rows go in padded batches: on a GPU, unlike a CPU, a batch costs much less than its
rows one by one.

What was proven: tests run this code against a stand-in for TensorRT and the driver, and every name that it uses was
found in the Python bindings of TensorRT 10.16 and 11.4. No plan was ever run by it.
"""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertship.artifacts import sha256_file
from bertship.cuda import Device, Stream, byte_count, find_device
from bertship.errors import InputError
from bertship.runners import OnnxRunner, run_in_batches
from bertship.tasks.base import Logits
from bertship.tokenization import Row

FACTS = ("version", "compute_capabilities", "sha256", "outputs")  # what a loader compares, or takes for granted


def check_facts(path: Path, facts: Mapping[str, Any], rebuild: str) -> None:
    """Refuse a plan that the manifest does not say enough of. Raises InputError."""
    if lacking := [name for name in FACTS if not facts.get(name)]:
        raise InputError(f"the manifest does not say {', '.join(lacking)} of {path}; build it here: {rebuild}")


def check_plan(path: Path, facts: Mapping[str, Any], version: str, device: Device, rebuild: str) -> None:
    """Refuse a plan of another TensorRT or GPU, or a changed file. `rebuild` is the command that mends it.

    A plan runs on the compute capability that it was built on, in the TensorRT of the very version. The driver may be
    any that runs that TensorRT; it is named, as it is the third thing to look at. Raises InputError.
    """
    remedy = f"build it here: {rebuild}"
    check_facts(path, facts, rebuild)
    if facts["version"] != version:
        raise InputError(f"{path} was built by TensorRT {facts['version']}, here is {version}; {remedy}")
    if device.compute_capability not in facts["compute_capabilities"]:
        built = ", ".join(facts["compute_capabilities"])
        raise InputError(
            f"{path} was built for compute capability {built} ({facts.get('gpu', 'unknown GPU')}, driver for CUDA "
            f"{facts.get('driver_cuda', 'unknown')}), here is {device.compute_capability} ({device.name}, driver for "
            f"CUDA {device.driver_cuda}); {remedy}"
        )
    if not path.is_file() or sha256_file(path) != facts["sha256"]:
        raise InputError(f"{path} is missing or has changed since it was built; {remedy}")


class TensorRTRunner:
    """A plan on the first GPU; `facts` are what the manifest says of it, `rebuild` the command that would build it.

    Raises InputError where TensorRT or the GPU is missing, and where `check_plan` refuses. One thread at a time.
    """

    def __init__(
        self,
        path: Path,
        facts: Mapping[str, Any],
        rebuild: str = "bertship plan EXPORT_DIR",
        trt: Any = None,
        cuda: Any = None,
    ) -> None:
        check_facts(path, facts, rebuild)
        if trt is None:
            try:
                trt = importlib.import_module("tensorrt")
            except ImportError:
                raise InputError(
                    f"{path} needs the Python package tensorrt {facts['version']}, which is not installed; "
                    "run in NVIDIA's container (docs/export.md)"
                ) from None
        self.path = Path(path)
        check_plan(self.path, facts, trt.__version__, find_device(cuda), rebuild)
        self._stream = Stream(cuda)
        log = trt.Logger(trt.Logger.WARNING)
        self._runtime = trt.Runtime(log)  # an engine needs its runtime alive
        engine = self._runtime.deserialize_cuda_engine(self.path.read_bytes())
        if engine is None:
            raise InputError(f"{path} does not load in TensorRT {trt.__version__}; build it here: {rebuild}")
        self._engine = engine
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        self.inputs = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        self.outputs = [name for name in names if name not in self.inputs]
        if set(self.inputs) != set(OnnxRunner.INPUTS):
            raise InputError(f"{path} has inputs {self.inputs}; {', '.join(OnnxRunner.INPUTS)} are needed")
        self.outputs = [name for name in facts["outputs"] if name in self.outputs]
        self._types = {name: np.dtype(trt.nptype(engine.get_tensor_dtype(name))) for name in names}
        self._tokenwise = {
            name: len(engine.get_tensor_shape(name)) > 1 and engine.get_tensor_shape(name)[1] == -1
            for name in self.outputs
        }
        self._profiles = []
        for index in range(engine.num_optimization_profiles):
            smallest, _, largest = (tuple(s) for s in engine.get_tensor_profile_shape(self.inputs[0], index))
            self._profiles.append((smallest, largest))
        self._contexts: dict[int, Any] = {}
        self._addresses: dict[int, dict[str, int]] = {}

    @property
    def buckets(self) -> tuple[int, ...]:
        """The longest rows of the profiles, in tokens."""
        return tuple(sorted({largest[1] for _, largest in self._profiles}))

    @property
    def max_batch(self) -> int:
        return int(min(largest[0] for _, largest in self._profiles))

    def run(self, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        """One padded batch by input name, each int64 [B, S]; float32 outputs. Raises InputError where none fits."""
        shape = feeds[self.inputs[0]].shape
        index = self._profile_of(shape)
        self._stream.use()
        context, addresses = self._context(index)
        kept = []  # until the copies are done
        for name in self.inputs:
            array = np.ascontiguousarray(feeds[name], dtype=self._types[name])
            kept.append(array)
            if not context.set_input_shape(name, shape):
                raise InputError(f"{self.path} refuses {name} of shape {list(shape)}")
            self._stream.upload(addresses[name], array)
        results = [np.empty(tuple(context.get_tensor_shape(name)), self._types[name]) for name in self.outputs]
        if not context.execute_async_v3(self._stream.handle):
            raise InputError(f"{self.path} did not run a batch of {list(shape)}; TensorRT's log says why")
        for name, result in zip(self.outputs, results, strict=True):
            self._stream.download(result, addresses[name])
        self._stream.wait()
        return [result.astype(np.float32, copy=False) for result in results]

    def _profile_of(self, shape: tuple[int, ...]) -> int:
        for index, (smallest, largest) in enumerate(self._profiles):
            if all(low <= n <= high for low, n, high in zip(smallest, shape, largest, strict=True)):
                return index
        offered = ", ".join(f"{list(low)} to {list(high)}" for low, high in self._profiles)
        raise InputError(f"{self.path} has no profile for a batch of {list(shape)}; it has {offered}")

    def _context(self, index: int) -> tuple[Any, dict[str, int]]:
        """The profile's context, and the addresses of its tensors, with room for its largest batch."""
        if index not in self._contexts:
            context = self._engine.create_execution_context()
            if context is None or not context.set_optimization_profile_async(index, self._stream.handle):
                raise InputError(f"{self.path}: no context for profile {index}; is the GPU's memory full?")
            largest = self._profiles[index][1]
            for name in self.inputs:
                context.set_input_shape(name, largest)
            addresses = {}
            for name in (*self.inputs, *self.outputs):
                shape = largest if name in self.inputs else tuple(context.get_tensor_shape(name))
                addresses[name] = self._stream.allocate(byte_count(shape, self._types[name]))
                if not context.set_tensor_address(name, addresses[name]):
                    raise InputError(f"{self.path} refuses the address of {name}")
            self._contexts[index], self._addresses[index] = context, addresses
        return self._contexts[index], self._addresses[index]

    def __call__(self, rows: Sequence[Row]) -> Logits:
        """Rows of like length in padded batches."""
        return run_in_batches(self.run, self.outputs, rows, self._tokenwise, self.buckets, self.max_batch)

    def warm_up(self, lengths: Sequence[int]) -> None:
        """A row of each length, so that the first request finds contexts and memory in place."""
        for length in lengths:
            self([Row(np.zeros(length, np.int64), np.zeros(length, np.int64))])

    def close(self) -> None:
        """Contexts before the engine, the engine before the runtime, memory last."""
        self._contexts.clear()
        self._engine = self._runtime = None
        self._stream.close()
