"""ONNX Runtime on a GPU, through CUDA or TensorRT, and never in silence on the CPU instead.

`pip install onnxruntime-gpu` lists its providers whether or not there is a driver; where one does not start, ONNX
Runtime logs a line and goes on with the CPU. Here that is an error.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from bertship.errors import InputError
from bertship.runners import OnnxRunner, run_in_batches
from bertship.tasks.base import Logits
from bertship.tokenization import Row
from bertship.triton_limits import PLAN_MAX_BATCH

PROVIDERS = {"cuda": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}


def assert_provider(session: Any, wanted: str, path: Path) -> None:
    """Raise InputError where a session does not run on `wanted` first of all."""
    running = session.get_providers()
    if running[:1] != [wanted]:
        raise InputError(
            f"{path} was to run on {wanted}, ONNX Runtime took {', '.join(running)} instead; the provider's libraries "
            "(CUDA, cuDNN, TensorRT) or the driver are missing: its log, above, names which"
        )


class OnnxGpuRunner:
    """An ONNX file on the provider "cuda" or "tensorrt", in padded batches of rows of at most `buckets` tokens.

    The session is kept to the one provider and, for the operators that it leaves, the CPU's, as ONNX Runtime demands.
    Raises InputError where the provider is not there or does not start.
    """

    def __init__(
        self, path: Path, provider: str, buckets: Sequence[int], max_batch: int = PLAN_MAX_BATCH, ort: Any = onnxruntime
    ) -> None:
        self.path, self.buckets, self.max_batch = Path(path), tuple(sorted(buckets)), max_batch
        wanted = PROVIDERS[provider]
        if not self.path.is_file():
            raise InputError(f"no such model: {self.path}")
        if wanted not in ort.get_available_providers():
            raise InputError(
                f"this ONNX Runtime has no {wanted} (it has {', '.join(ort.get_available_providers())}); "
                "install onnxruntime-gpu in place of onnxruntime"
            )
        ort.disable_telemetry_events()
        options = ort.SessionOptions()
        options.log_severity_level = 2  # the line that says why a provider did not start
        try:
            session = ort.InferenceSession(str(self.path), options, providers=[(wanted, self._settings(provider))])
            session.disable_fallback()
        except Exception as error:  # the library has no common base class for its errors
            raise InputError(f"{self.path} does not load on {wanted}: {str(error).splitlines()[0]}") from None
        assert_provider(session, wanted, self.path)
        inputs = {tensor.name: tensor for tensor in session.get_inputs()}
        if set(inputs) != set(OnnxRunner.INPUTS):
            raise InputError(f"{self.path} has inputs {sorted(inputs)}; {', '.join(OnnxRunner.INPUTS)} are needed")
        self._session: Any = session
        self.outputs = [tensor.name for tensor in session.get_outputs()]
        sequence = inputs["input_ids"].shape[1]
        self._tokenwise = {
            tensor.name: len(tensor.shape) > 1 and tensor.shape[1] == sequence for tensor in session.get_outputs()
        }

    def _settings(self, provider: str) -> dict[str, str]:
        """TensorRT's provider is told the shapes at the start: it would build anew for each that it had not seen."""
        if provider != "tensorrt":
            return {}
        usual = (min(8, self.max_batch), self.buckets[-1])
        shapes = {"min": (1, 1), "opt": usual, "max": (self.max_batch, self.buckets[-1])}
        return {
            f"trt_profile_{which}_shapes": ",".join(f"{name}:{rows}x{tokens}" for name in OnnxRunner.INPUTS)
            for which, (rows, tokens) in shapes.items()
        }

    def run(self, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        """One padded batch by input name, each int64 [B, S]; outputs in the graph's order."""
        return list(self._session.run(self.outputs, feeds))

    def __call__(self, rows: Sequence[Row]) -> Logits:
        return run_in_batches(self.run, self.outputs, rows, self._tokenwise, self.buckets, self.max_batch)

    def close(self) -> None:
        """A second call does nothing."""
        self._session = None
