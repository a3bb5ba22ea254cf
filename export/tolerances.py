"""What the gate allows each precision, and the largest that was measured: data, in this one place.

The measured figures are the worst of four fine-tuned encoders (6 layers, hidden 384: film reviews, STS-B, WNUT-17,
SQuAD; 500 dev examples each) on a CPU with AVX-512 and VNNI. `python -m benchmarks.tolerances EXPORT_DIR...` measures
any export again.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerance:
    """Differences are shares of the largest magnitude that PyTorch FP32 gives to the same tensor.

    `max_difference`: of a logit; `layer`: of a value in the encoder's hidden states, by which a layer counts as
    departing; `agreement`: smallest share of equal decisions. `measured_*`: the worst that honest artifacts showed.
    """

    max_difference: float
    agreement: float
    layer: float
    measured_difference: float
    measured_agreement: float
    measured_layer: float | None  # None: not measured


TOLERANCES = {
    "fp32": Tolerance(1e-4, 1.0, 1e-4, measured_difference=4.4e-6, measured_agreement=1.0, measured_layer=1.8e-6),
    "fp16": Tolerance(2e-2, 0.995, 2e-2, measured_difference=2.6e-3, measured_agreement=1.0, measured_layer=4.7e-3),
    "int8": Tolerance(0.3, 0.98, 0.3, measured_difference=0.27, measured_agreement=0.984, measured_layer=0.11),
    # of 120 examples of WNUT-17 alone
    "int8_qdq": Tolerance(0.3, 0.98, 0.3, measured_difference=0.051, measured_agreement=0.992, measured_layer=None),
}

METRIC_DROP = 0.005  # of a share, or two examples, whichever is more
METRIC_EXAMPLES = 2
# of the largest logit: what a row may change by when the row beside it becomes all padding; 0 was measured, of every
# graph of three of those encoders: only kernels that a GPU chooses by the data could round otherwise
NEIGHBOUR = 1e-3
