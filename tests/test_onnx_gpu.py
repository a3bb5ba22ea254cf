"""bertship/onnx_gpu.py: the provider that was asked for, or an error; never the CPU in silence. No GPU is used here."""

import types

import numpy as np
import onnxruntime
import pytest
from small_bert import TASKS_BY_HEAD, make_model
from test_onnx_graph import feeds_of
from test_precision import rows_of

from bertship.errors import InputError
from bertship.onnx_gpu import PROVIDERS, OnnxGpuRunner
from bertship.runners import OnnxRunner
from export.onnx_graph import export_onnx

BUCKETS = (16, 64)


@pytest.fixture(scope="module", params=TASKS_BY_HEAD)
def graph(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("graph") / "model.onnx"
    export_onnx(make_model(request.param), path)
    return path


def pretend(offered, running):
    """ONNX Runtime that offers and runs on what is said, and computes on the CPU."""
    asked = []

    class Session:
        def __init__(self, path, options, providers):
            asked.append(providers)
            self.real = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

        def get_providers(self):
            return running

        def disable_fallback(self): ...

        def __getattr__(self, name):
            return getattr(self.real, name)

    module = types.SimpleNamespace(
        get_available_providers=lambda: offered,
        disable_telemetry_events=onnxruntime.disable_telemetry_events,
        SessionOptions=onnxruntime.SessionOptions,
        InferenceSession=Session,
    )
    return module, asked


@pytest.mark.parametrize("provider", PROVIDERS)
def test_this_onnx_runtime_has_no_gpu_and_says_so(graph, provider):
    if PROVIDERS[provider] in onnxruntime.get_available_providers():
        pytest.skip("onnxruntime-gpu is installed here")
    with pytest.raises(InputError, match=f"has no {PROVIDERS[provider]}.*install onnxruntime-gpu"):
        OnnxGpuRunner(graph, provider, BUCKETS)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_silent_fallback_to_the_cpu_is_an_error(graph, provider):
    module, _ = pretend([PROVIDERS[provider]], ["CPUExecutionProvider"])
    with pytest.raises(InputError, match=f"was to run on {PROVIDERS[provider]}, ONNX Runtime took CPUExec") as caught:
        OnnxGpuRunner(graph, provider, BUCKETS, ort=module)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_rows_go_in_padded_batches_and_come_back_in_order(graph, provider):
    module, asked = pretend([PROVIDERS[provider]], [PROVIDERS[provider], "CPUExecutionProvider"])
    runner = OnnxGpuRunner(graph, provider, BUCKETS, max_batch=3, ort=module)
    shapes = []
    run, runner.run = runner.run, lambda feeds: shapes.append(feeds["input_ids"].shape) or run(feeds)
    rows = rows_of((40, 1, 16, 17, 7, 64, 2, 3))
    wanted = OnnxRunner(graph, threads=1)(rows)
    for name, values in runner(rows).items():
        for value, expected in zip(values, wanted[name], strict=True):
            np.testing.assert_allclose(value, expected, atol=2e-5 * np.abs(expected).max())
    assert {tokens for _, tokens in shapes} == set(BUCKETS)
    assert max(batch for batch, _ in shapes) == 3
    ((asked_for, settings),) = asked[0]
    assert asked_for == PROVIDERS[provider]
    assert ("trt_profile_max_shapes" in settings) == (provider == "tensorrt")
    if settings:
        assert settings["trt_profile_max_shapes"].startswith("input_ids:3x64,")
    assert len(runner.run(feeds_of(2, 16))) == len(runner.outputs)
