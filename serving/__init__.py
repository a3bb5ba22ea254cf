"""Serving: the model repository, the embedded Triton server, and what starts, watches and measures it."""
