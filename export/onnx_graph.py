"""One canonical ONNX graph a model; every engine and precision is made from it."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import onnx
import torch

from bertship.runners import OnnxRunner
from train.heads import HeadedModel

OPSET = 18  # the newest that ONNX Runtime, TensorRT 10 and 11 and their quantizers all read


def export_onnx(model: HeadedModel, path: Path) -> None:
    """Write `model` in FP32 with inputs by name (int64 [batch, sequence], both free) and its OUTPUTS.

    The graph is checked, with shapes inferred, before this returns.
    """
    model.eval()
    # traced at sizes that are neither 0 nor 1 nor equal: the exporter would take those for constants or for each other
    example = {name: torch.ones(3, 7, dtype=torch.int64) for name in OnnxRunner.INPUTS}
    longest = model.config.max_position_embeddings
    dynamic = {0: torch.export.Dim("batch", min=1), 1: torch.export.Dim("sequence", min=1, max=longest)}
    with quiet():
        torch.onnx.export(
            model,
            kwargs=example,
            f=str(path),
            dynamo=True,
            opset_version=OPSET,
            input_names=list(OnnxRunner.INPUTS),
            output_names=list(model.OUTPUTS),
            dynamic_shapes=dict.fromkeys(OnnxRunner.INPUTS, dynamic),
            external_data=False,
            verbose=False,
        )
    onnx.checker.check_model(str(path), full_check=True)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the exporter's and the quantizer's chatter off the terminal; their errors are exceptions."""
    levels = {name: logging.getLogger(name).level for name in ("", "torch.onnx", "onnxscript", "onnx_ir")}
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for name in levels:
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
