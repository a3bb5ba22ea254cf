"""The few calls of NVIDIA's driver that running an engine takes: the device, memory, one stream, copies, events.

Through `ctypes` and `libcuda.so.1`, which every driver brings: no CUDA toolkit, no further package. Names and meanings
are those of the CUDA Driver API reference; `_v2` is in the names that its header gives to the plain ones.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bertship.errors import InputError

# CUdevice_attribute in cuda.h
_MAJOR, _MINOR = 75, 76


@dataclass(frozen=True)
class Device:
    """The first GPU that the process sees; `driver_cuda` is the newest CUDA that its driver runs."""

    name: str
    compute_capability: str  # such as "9.0"
    driver_cuda: str  # such as "12.8"


def load_driver() -> Any:
    """The driver's library. Raises InputError where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise InputError(
            "no NVIDIA driver here (libcuda.so.1 is missing): TensorRT builds and runs on the GPU that serves; "
            "do it there, in NVIDIA's container (docs/export.md)"
        ) from None


def _call(function: Any, *arguments: Any) -> None:
    status = function(*arguments)
    if status != 0:
        raise InputError(
            f"the GPU cannot be used: {function.__name__} says {status} (CUresult); `nvidia-smi` shows its state"
        )


def find_device(cuda: Any = None) -> Device:
    """What the driver says of the first GPU. Raises InputError where there is none, or it cannot be used."""
    cuda = cuda or load_driver()
    numbers = {key: ctypes.c_int() for key in ("driver", "device", "major", "minor")}
    name = ctypes.create_string_buffer(256)
    _call(cuda.cuInit, 0)
    _call(cuda.cuDriverGetVersion, ctypes.byref(numbers["driver"]))
    _call(cuda.cuDeviceGet, ctypes.byref(numbers["device"]), 0)
    _call(cuda.cuDeviceGetName, name, len(name), numbers["device"])
    _call(cuda.cuDeviceGetAttribute, ctypes.byref(numbers["major"]), _MAJOR, numbers["device"])
    _call(cuda.cuDeviceGetAttribute, ctypes.byref(numbers["minor"]), _MINOR, numbers["device"])
    driver = numbers["driver"].value
    return Device(
        name.value.decode(errors="replace"),
        f"{numbers['major'].value}.{numbers['minor'].value}",
        f"{driver // 1000}.{driver % 1000 // 10}",
    )


class Stream:
    """The first GPU's primary context, one stream in it, and memory that lives as long as the stream.

    Calls belong to one thread at a time; `use` makes the context that of the calling thread.
    """

    def __init__(self, cuda: Any = None) -> None:
        self._cuda = cuda or load_driver()
        self._device, self._context, self._stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self._memory: list[ctypes.c_uint64] = []
        _call(self._cuda.cuInit, 0)
        _call(self._cuda.cuDeviceGet, ctypes.byref(self._device), 0)
        _call(self._cuda.cuDevicePrimaryCtxRetain, ctypes.byref(self._context), self._device)
        self.use()
        _call(self._cuda.cuStreamCreate, ctypes.byref(self._stream), 1)  # CU_STREAM_NON_BLOCKING

    @property
    def handle(self) -> int:
        """What TensorRT takes as `stream_handle`."""
        return int(self._stream.value or 0)

    def use(self) -> None:
        _call(self._cuda.cuCtxSetCurrent, self._context)

    def allocate(self, count: int) -> int:
        """The address of `count` bytes on the GPU, freed by `close`."""
        address = ctypes.c_uint64()
        _call(self._cuda.cuMemAlloc_v2, ctypes.byref(address), ctypes.c_size_t(max(count, 1)))
        self._memory.append(address)
        return int(address.value)

    def upload(self, address: int, array: np.ndarray) -> None:
        """Copy a contiguous array to the GPU, in the stream's order; keep it until `wait`."""
        assert array.flags.c_contiguous
        source = array.ctypes.data_as(ctypes.c_void_p)
        _call(
            self._cuda.cuMemcpyHtoDAsync_v2,
            ctypes.c_uint64(address),
            source,
            ctypes.c_size_t(array.nbytes),
            self._stream,
        )

    def download(self, array: np.ndarray, address: int) -> None:
        """Fill a contiguous array from the GPU, in the stream's order; it is there after `wait`."""
        assert array.flags.c_contiguous
        target = array.ctypes.data_as(ctypes.c_void_p)
        _call(
            self._cuda.cuMemcpyDtoHAsync_v2,
            target,
            ctypes.c_uint64(address),
            ctypes.c_size_t(array.nbytes),
            self._stream,
        )

    def wait(self) -> None:
        """Until all that was asked of the stream is done."""
        _call(self._cuda.cuStreamSynchronize, self._stream)

    def close(self) -> None:
        """Free everything; a second call does nothing."""
        if self._stream.value is None:
            return
        self.use()
        for address in self._memory:
            self._cuda.cuMemFree_v2(address)
        self._cuda.cuStreamDestroy_v2(self._stream)
        self._cuda.cuDevicePrimaryCtxRelease_v2(self._device)
        self._memory, self._stream = [], ctypes.c_void_p()


def byte_count(shape: Sequence[int], dtype: np.dtype) -> int:
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
