"""The same fine-tuned model to ONNX, ours and a peer's way, for `benchmarks/peers.py`: each a process of its own."""
