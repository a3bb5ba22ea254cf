"""How the samples of a batch lie in what is computed: a row each, several in a row, or all in one row end to end.

    padded     a row each, padded to the longest: what any BERT takes
    packed     rows of one length, filled with whole samples (best fit, longest first): equal shapes, little padding
    unpadded   one row with all samples, end to end: no padding but up to a multiple of ALIGNED, a new shape each time

Attention, positions and the NSP head keep the samples apart (`train.attention`), so all three give the same losses.
"""

from collections.abc import Sequence

import numpy as np

from bertship.tokenization import Row, pad
from train.dataset import Sample

LAYOUTS = ("padded", "packed", "unpadded")
ALIGNED = 8  # tokens; matrix products of other sizes miss a GPU's fast kernels
WHERE = "where_"  # before the names of `train.attention.Sequences` in a batch


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of `lengths` in rows of at most `capacity` tokens: longest first, each where it leaves the least room.

    Every index once; the same for the same lengths. No length may be above `capacity`.
    """
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # rows by the tokens that still fit
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        assert length <= capacity
        room = next((room for room in range(length, capacity + 1) if by_room[room]), None)
        if room is None:
            rows.append([])
            row, room = len(rows) - 1, capacity
        else:
            row = by_room[room].pop()
        rows[row].append(index)
        by_room[room - length].append(row)
    return rows


def lay_out(samples: Sequence[Sample], layout: str, pad_id: int, packed_length: int = 0) -> dict[str, np.ndarray]:
    """The samples as arrays, all int64: `input_ids`, `attention_mask`, `token_type_ids` [R, L], `predicted_positions`
    [M] into the flattened [R * L], `mlm_labels` [M], `nsp_labels` [B].

    Where samples share rows, the fields of `train.attention.Sequences` are there too, under WHERE + name, and the
    samples' order is that in the rows.
    """
    if layout == "padded":
        inputs = pad([sample.row for sample in samples], pad_id)
        starts = np.arange(len(samples)) * inputs["input_ids"].shape[1]
        return inputs | _targets(samples, starts)
    lengths = [len(sample.row) for sample in samples]
    if layout == "packed":
        rows = pack(lengths, packed_length)
    else:
        rows, packed_length = [list(range(len(samples)))], -(-sum(lengths) // ALIGNED) * ALIGNED
    ordered = [samples[index] for row in rows for index in row]
    joined = [
        Row(np.concatenate([samples[i].row.ids for i in row]), np.concatenate([samples[i].row.types for i in row]))
        for row in rows
    ]
    inputs = pad(joined, pad_id, packed_length)
    sizes = np.array([len(sample.row) for sample in ordered], np.int64)
    begins = np.concatenate([[0], np.cumsum(sizes)])  # in the list of real tokens
    tokens = np.flatnonzero(inputs["attention_mask"])
    return inputs | _targets(ordered, tokens[begins[:-1]]) | _where(inputs["input_ids"].shape, tokens, begins)


def _targets(samples: Sequence[Sample], starts: np.ndarray) -> dict[str, np.ndarray]:
    return {
        "predicted_positions": np.concatenate([s.positions + start for s, start in zip(samples, starts, strict=True)]),
        "mlm_labels": np.concatenate([sample.labels for sample in samples]),
        "nsp_labels": np.array([sample.next_label for sample in samples], np.int64),
    }


def _where(shape: tuple[int, ...], tokens: np.ndarray, begins: np.ndarray) -> dict[str, np.ndarray]:
    sizes = np.diff(begins)
    longest = int(sizes.max())
    of = np.repeat(np.arange(len(sizes)), sizes)  # [T], the sequence of each token
    place = np.arange(len(tokens)) - begins[of]  # [T], its place there
    positions = np.zeros(shape[0] * shape[1], np.int64)
    positions[tokens] = place
    places = np.zeros((len(sizes), longest), np.int64)
    places[of, place] = tokens
    real = np.zeros((len(sizes), longest), np.int64)
    real[of, place] = 1
    back = np.zeros(shape[0] * shape[1], np.int64)
    back[tokens] = of * longest + place
    fields = {
        "positions": positions.reshape(shape),
        "first": tokens[begins[:-1]],
        "last": tokens[begins[1:] - 1],
        "places": places,
        "real": real,
        "back": back,
        "tokens": tokens,
        "bounds": begins,
    }
    return {f"{WHERE}{name}": value.astype(np.int64) for name, value in fields.items()}
