"""Where a graph leaves the model: hidden states compared layer by layer, from the embeddings on.

A layer's output is what its last LayerNorm gives. The LayerNorms of a graph follow each other in the order of the
model's: one of the embeddings, two a block. Their weights' names would not do, as equal weights are stored once.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch

from bertship.runners import available_threads
from train.heads import HeadedModel

HEAD = "the head"


def layer_names(model: HeadedModel) -> list[str]:
    """The model's layers in the order of the forward pass, as its modules are called."""
    return ["encoder.embeddings", *(f"encoder.blocks.{i}" for i in range(model.config.num_hidden_layers))]


def layer_outputs(graph: onnx.GraphProto, model: HeadedModel) -> dict[str, str]:
    """The name of each layer's output in `graph`; empty where it has another number of LayerNorms than the model."""
    norms = [node.output[0] for node in graph.node if node.op_type.endswith("LayerNormalization")]
    names = layer_names(model)
    return dict(zip(names, norms[::2], strict=True)) if len(norms) == 2 * len(names) - 1 else {}


def torch_hidden(model: HeadedModel, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Each layer's output of the PyTorch model, float32 [B, S, H], by layer."""
    found: dict[str, np.ndarray] = {}
    modules = dict(model.named_modules())

    def keep(layer: str) -> Any:
        def hook(module: Any, inputs: Any, output: torch.Tensor) -> None:
            found[layer] = output.float().cpu().numpy()

        return hook

    hooks = [modules[layer].register_forward_hook(keep(layer)) for layer in layer_names(model)]
    try:
        with torch.inference_mode():
            # the encoder itself: a head may ask it for less than whole layers
            model.eval().encoder(**{name: torch.from_numpy(values) for name, values in feeds.items()})
    finally:
        for hook in hooks:
            hook.remove()
    return found


def graph_hidden(path: Path, model: HeadedModel, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Each layer's output of the graph at `path` on ONNX Runtime's CPU provider, by layer."""
    graph = onnx.load(path)
    outputs = layer_outputs(graph.graph, model)
    known = {output.name for output in graph.graph.output}
    graph.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs.values() if name not in known)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = available_threads()
    session = onnxruntime.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])
    values = session.run(list(outputs.values()), dict(feeds))
    return {layer: np.asarray(value, np.float32) for layer, value in zip(outputs, values, strict=True)}


def differences(
    wanted: Mapping[str, np.ndarray], got: Mapping[str, np.ndarray], mask_BS: np.ndarray
) -> dict[str, float]:
    """Each layer's largest difference at real tokens, as a share of the wanted values' largest magnitude there.

    A graph's last layer may have the first token alone, which is compared then.
    """
    shares = {}
    with np.errstate(invalid="ignore", over="ignore"):
        for layer in wanted:
            if layer in got:
                tokens = got[layer].shape[1]
                real = mask_BS[:, :tokens].astype(bool)
                expected = wanted[layer][:, :tokens][real]
                difference = np.abs(got[layer][real].astype(np.float64) - expected)
                shares[layer] = float(difference.max() / np.abs(expected).max())
    return shares


def first_departure(shares: Mapping[str, float], limit: float) -> str:
    """The first layer that departs by more than `limit` or is not finite; HEAD where none does."""
    if not shares:
        return "unknown (the graph's LayerNorms are not the model's)"
    return next((layer for layer, share in shares.items() if not share <= limit), HEAD)


def layer_of(graph: onnx.GraphProto, model: HeadedModel, tensor: str) -> str:
    """The layer that computes `tensor`: the first whose output is not made before it; HEAD after the last."""
    ends = {output: layer for layer, output in layer_outputs(graph, model).items()}
    reached = False
    for node in graph.node:
        reached = reached or tensor in node.output
        for output in node.output:
            if reached and output in ends:
                return ends[output]
    return HEAD
