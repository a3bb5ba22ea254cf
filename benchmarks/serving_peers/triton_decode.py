"""Answering step in transformer-deploy's manner: softmax over labels, or the best span of one window."""

import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

MAX_ANSWER_TOKENS = 30


class TritonPythonModel:
    def initialize(self, args):
        folder = Path(args["model_repository"]) / args["model_version"]
        self.labels = json.loads((folder / "settings.json").read_text())["labels"]

    def execute(self, requests):
        return [self.classify(request) if self.labels else self.span(request) for request in requests]

    def classify(self, request):
        logits = pb_utils.get_input_tensor_by_name(request, "logits").as_numpy()
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        answers = np.array([self.labels[i].encode() for i in shares.argmax(axis=1)], object)
        return self.respond(answers, shares.max(axis=1).astype(np.float32))

    def span(self, request):
        names = ("CONTEXT", "OFFSETS", "start_logits", "end_logits")
        contexts, offsets, starts, ends = (pb_utils.get_input_tensor_by_name(request, n).as_numpy() for n in names)
        answers, scores = [], []
        for context, places, start, end in zip(contexts, offsets, starts, ends, strict=True):
            inside = np.flatnonzero(places[:, 0] >= 0)
            both = start[inside][:, None] + end[inside][None, :]
            allowed = np.tril(np.triu(np.ones_like(both)), MAX_ANSWER_TOKENS - 1) > 0
            both = np.where(allowed, both, -np.inf)
            first, last = np.unravel_index(both.argmax(), both.shape)
            text = context.decode()
            answers.append(text[places[inside[first], 0] : places[inside[last], 1]].encode())
            scores.append(both.max())
        return self.respond(np.array(answers, object), np.array(scores, np.float32))

    def respond(self, answers, scores):
        return pb_utils.InferenceResponse([pb_utils.Tensor("ANSWER", answers), pb_utils.Tensor("SCORE", scores)])
