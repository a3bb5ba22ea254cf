"""Other ways to serve the same weights, for `benchmarks/serving.py`: each as its own authors would set it up."""
