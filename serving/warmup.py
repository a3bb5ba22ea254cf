"""Samples that Triton runs through a model before it calls the model ready (`model_warmup`).

Everything is zero: an empty text, rows of the padding id, logits of 0. That is enough to allocate memory, to start
threads and, in an engine, to make the kernels of a shape. An ensemble takes none: each of its steps has its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tritonclient.grpc import model_config_pb2 as pb


def add_warmups(config: Any, shapes: Sequence[Mapping[str, int]]) -> None:
    """Add a sample for each of `shapes`: `tokens`, what a free dimension of rows becomes, and `rows` of a batch."""
    for shape in shapes:
        tokens, rows = shape["tokens"], shape.get("rows", 1)
        batch = rows if config.max_batch_size else 0
        sample = config.model_warmup.add(name=f"{max(batch, 1)}x{tokens}", batch_size=batch)
        for tensor in config.input:
            # where the batch is a dimension of the tensor, it is the first one
            free = [1, *[tokens] * (len(tensor.dims) - 1)] if not batch else [tokens] * len(tensor.dims)
            dims = [size if dim == -1 else dim for dim, size in zip(tensor.dims, free, strict=True)]
            sample.inputs[tensor.name].CopyFrom(
                pb.ModelWarmup.Input(data_type=tensor.data_type, dims=dims, zero_data=True)
            )


def warmed_shapes(config: Any) -> set[tuple[int, int]]:
    """The (rows, tokens) that a batching model is warmed with: its inputs are [tokens] each."""
    return {
        (sample.batch_size, tensor.dims[0])
        for sample in config.model_warmup
        for tensor in sample.inputs.values()
        if len(tensor.dims) == 1
    }
