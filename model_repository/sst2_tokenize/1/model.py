"""sst2, step `tokenize`: texts to rows. The code is in bertship."""

from bertship.triton_steps import TokenizeStep as TritonPythonModel

__all__ = ["TritonPythonModel"]
