"""Tokenizing step in transformer-deploy's manner: each request by itself, one after another."""

import json
from pathlib import Path

import numpy as np
import tokenizers
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        folder = Path(args["model_repository"]) / args["model_version"]
        settings = json.loads((folder / "settings.json").read_text())
        self.names = settings["names"]
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        strategy = "longest_first" if len(self.names) == 1 else "only_second"
        self.tokenizer.enable_truncation(settings["max_tokens"], strategy=strategy)

    def execute(self, requests):
        responses = []
        for request in requests:
            texts = [
                [text.decode() for text in pb_utils.get_input_tensor_by_name(request, name).as_numpy().ravel()]
                for name in self.names
            ]
            encoded = [self.tokenizer.encode(*parts) for parts in zip(*texts, strict=True)]
            tensors = [
                pb_utils.Tensor("input_ids", np.array([e.ids for e in encoded], np.int64)),
                pb_utils.Tensor("attention_mask", np.array([e.attention_mask for e in encoded], np.int64)),
                pb_utils.Tensor("token_type_ids", np.array([e.type_ids for e in encoded], np.int64)),
            ]
            if len(self.names) > 1:
                offsets = [
                    [place if kind == 1 else (-1, -1) for place, kind in zip(e.offsets, e.sequence_ids, strict=True)]
                    for e in encoded
                ]
                tensors.append(pb_utils.Tensor("OFFSETS", np.array(offsets, np.int32)))
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
