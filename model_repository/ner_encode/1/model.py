"""ner, step `encode`: rows to logits, where no native backend does it. The code is in bertship."""

from bertship.triton_steps import EncodeStep as TritonPythonModel

__all__ = ["TritonPythonModel"]
