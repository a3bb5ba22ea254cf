"""mnli, step `decode`: logits to answers. The code is in bertship."""

from bertship.triton_steps import DecodeStep as TritonPythonModel

__all__ = ["TritonPythonModel"]
