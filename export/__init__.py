"""A fine-tuned model as engines: ONNX in several precisions, each let through by a gate that can fail."""
