"""Stand-ins for TensorRT and the driver: the calls that are made, and the rules of their documentation.

The driver's memory is the host's. A "plan" is the JSON of its profiles and the path of an ONNX file, which ONNX Runtime
computes. What a real GPU, driver or TensorRT does is not shown by this.
"""

import ctypes
import json
import types
from pathlib import Path

import numpy as np
import onnx

from bertship.runners import OnnxRunner


class FakeCuda:
    """`libcuda.so.1` for one GPU; `capability` such as (9, 0)."""

    def __init__(self, capability=(9, 0), name=b"NVIDIA H200", driver=12080):
        self.capability, self.name, self.driver = capability, name, driver
        self.live: dict[int, ctypes.Array] = {}
        self.calls: list[str] = []
        self.pending: list = []  # copies of the stream, done at the wait
        for function in [n for n in dir(self) if n.startswith("_cu")]:
            self._expose(function)

    def _expose(self, function):
        def call(*arguments):
            self.calls.append(function[1:])
            return getattr(self, function)(*arguments) or 0

        call.__name__ = function[1:]
        setattr(self, function[1:], call)

    def _cuInit(self, flags): ...

    def _cuDriverGetVersion(self, version):
        version._obj.value = self.driver

    def _cuDeviceGet(self, device, ordinal):
        device._obj.value = ordinal

    def _cuDeviceGetName(self, buffer, length, device):
        buffer.value = self.name

    def _cuDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = self.capability[{75: 0, 76: 1}[attribute]]

    def _cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = 1

    def _cuDevicePrimaryCtxRelease_v2(self, device): ...

    def _cuCtxSetCurrent(self, context): ...

    def _cuStreamCreate(self, stream, flags):
        stream._obj.value = 77

    def _cuStreamDestroy_v2(self, stream): ...

    def _cuStreamSynchronize(self, stream):
        for target, source, count in self.pending:
            ctypes.memmove(target, source, count)
        self.pending.clear()

    def _cuMemAlloc_v2(self, address, count):
        memory = ctypes.create_string_buffer(count.value)
        address._obj.value = ctypes.addressof(memory)
        self.live[address._obj.value] = memory

    def _cuMemFree_v2(self, address):
        del self.live[address.value]

    def _cuMemcpyHtoDAsync_v2(self, target, source, count, stream):
        assert count.value <= len(self.live[target.value])
        ctypes.memmove(target.value, source, count.value)

    def _cuMemcpyDtoHAsync_v2(self, target, source, count, stream):
        assert count.value <= len(self.live[source.value])
        self.pending.append((target, source.value, count.value))


INT64, FLOAT = "int64", "float32"


class Context:
    def __init__(self, engine):
        self.engine, self.profile, self.shapes, self.addresses = engine, 0, {}, {}

    def set_optimization_profile_async(self, profile_index, stream_handle):
        assert stream_handle == 77
        self.profile = profile_index
        return profile_index < self.engine.num_optimization_profiles

    def set_input_shape(self, name, shape):
        smallest, _, largest = self.engine.get_tensor_profile_shape(name, self.profile)
        fits = all(a <= b <= c for a, b, c in zip(smallest, shape, largest, strict=True))
        if fits:
            self.shapes[name] = tuple(shape)
        return fits

    def get_tensor_shape(self, name):
        if name in self.shapes:
            return self.shapes[name]
        batch, tokens = self.shapes["input_ids"]
        return tuple(
            batch if i == 0 else tokens if d == -1 else d for i, d in enumerate(self.engine.get_tensor_shape(name))
        )

    def set_tensor_address(self, name, memory):
        self.addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle):
        assert stream_handle == 77 and set(self.addresses) == set(self.engine.names)
        feeds = {}
        for name in OnnxRunner.INPUTS:
            count = int(np.prod(self.shapes[name]))
            memory = (ctypes.c_int64 * count).from_address(self.addresses[name])
            feeds[name] = np.array(memory, np.int64).reshape(self.shapes[name])
        for name, output in zip(self.engine.runner.outputs, self.engine.runner.run(feeds), strict=True):
            output = np.ascontiguousarray(output, np.float32)
            assert output.shape == self.get_tensor_shape(name)
            ctypes.memmove(self.addresses[name], output.ctypes.data, output.nbytes)
        return True


class Engine:
    def __init__(self, plan):
        facts = json.loads(plan)
        self.profiles, self.runner = facts["profiles"], OnnxRunner(Path(facts["graph"]), threads=1)
        graph = onnx.load(facts["graph"]).graph
        self.shapes = {
            tensor.name: tuple(d.dim_value or -1 for d in tensor.type.tensor_type.shape.dim)
            for tensor in (*graph.input, *graph.output)
        }
        self.names = list(self.shapes)
        self.num_io_tensors, self.num_optimization_profiles = len(self.names), len(self.profiles)

    def get_tensor_name(self, index):
        return self.names[index]

    def get_tensor_mode(self, name):
        return "in" if name in OnnxRunner.INPUTS else "out"

    def get_tensor_dtype(self, name):
        return INT64 if name in OnnxRunner.INPUTS else FLOAT

    def get_tensor_shape(self, name):
        return self.shapes[name]

    def get_tensor_profile_shape(self, name, profile_index):
        return [tuple(shape) for shape in self.profiles[profile_index]]

    def create_execution_context(self):
        return Context(self)


class Runtime:
    def __init__(self, logger): ...

    def deserialize_cuda_engine(self, serialized_engine):
        return Engine(serialized_engine) if serialized_engine.startswith(b"{") else None


class Logger:
    WARNING = "warning"

    def __init__(self, severity): ...


def fake_tensorrt(version="10.16.1.11"):
    """The module `tensorrt` as a runner uses it."""
    return types.SimpleNamespace(
        __name__="tensorrt",
        __version__=version,
        Logger=Logger,
        Runtime=Runtime,
        TensorIOMode=types.SimpleNamespace(INPUT="in", OUTPUT="out"),
        nptype=lambda dtype: np.dtype(dtype).type,
    )


def write_plan(path: Path, graph: Path, profiles) -> bytes:
    data = json.dumps({"graph": str(graph), "profiles": [list(shapes) for shapes in profiles]}).encode()
    path.write_bytes(data)
    return data
