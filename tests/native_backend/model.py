"""A stand-in for Triton's TensorRT and ONNX Runtime backends, for tests: ONNX Runtime that keeps a plan's limits.

A plan here is an ONNX file whose metadata holds `profiles`, a JSON list of {"smallest", "usual", "largest"} (rows,
tokens). As the real backend does: profile 0 alone is used unless the instance group lists profiles; among those that
a batch fits, the one whose usual shape is nearest (Manhattan distance) is taken; a batch that fits none is refused.
An ONNX file without that takes everything. Every execution is noted in `executions.jsonl` beside the file. It proves
wiring, buckets and batches; of TensorRT it proves nothing.
"""

import json
import time
from pathlib import Path

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils

TYPES = {"TYPE_INT64": np.int64, "TYPE_INT32": np.int32, "TYPE_FP32": np.float32}


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        return config

    def initialize(self, args):
        config = json.loads(args["model_config"])
        folder = Path(args["model_repository"]) / args["model_version"]
        plan = folder / config["default_model_filename"]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(str(plan), options, providers=["CPUExecutionProvider"])
        anything = {"smallest": (1, 1), "usual": (1, 1), "largest": (10**6, 10**6)}
        stored = self.session.get_modelmeta().custom_metadata_map.get("profiles")
        profiles = json.loads(stored) if stored else [anything]
        listed = [int(number) for group in config["instance_group"] for number in group.get("profile", [])] or [0]
        if max(listed) >= len(profiles) or len(set(listed)) < len(listed):
            raise pb_utils.TritonModelException(f"profiles {listed} of {len(profiles)}")
        self.profiles = {number: profiles[number] for number in listed}
        if most := [p for p in self.profiles.values() if p["largest"][0] < config["max_batch_size"]]:
            raise pb_utils.TritonModelException(
                f"max_batch_size {config['max_batch_size']} exceeds the {most[0]['largest'][0]} rows of a profile"
            )
        self.inputs = {tensor["name"]: TYPES[tensor["data_type"]] for tensor in config["input"]}
        self.outputs = [tensor["name"] for tensor in config["output"]]
        self.notes = (folder / "executions.jsonl").open("a")

    def execute(self, requests):
        tensors = [{n: pb_utils.get_input_tensor_by_name(r, n).as_numpy() for n in self.inputs} for r in requests]
        shapes = [of["input_ids"].shape for of in tensors]
        feeds = {name: np.concatenate([of[name] for of in tensors]) for name in self.inputs}
        rows, tokens = feeds["input_ids"].shape
        fitting = {
            number: abs(p["usual"][0] - rows) + abs(p["usual"][1] - tokens)
            for number, p in self.profiles.items()
            if p["smallest"][0] <= rows <= p["largest"][0] and p["smallest"][1] <= tokens <= p["largest"][1]
        }
        wrong = [name for name, kind in self.inputs.items() if feeds[name].dtype != kind]
        if not fitting or wrong:
            message = (
                f"no profile takes {rows} rows of {tokens} tokens{f', or wrong types of {wrong}' if wrong else ''}"
            )
            error = pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG)
            return [pb_utils.InferenceResponse(error=error) for _ in requests]
        profile = min(fitting, key=fitting.get)
        time.sleep(0.005)  # as an engine takes its time, in which others queue
        # a plan built for INT32 is an INT64 graph here
        made = self.session.run(self.outputs, {name: value.astype(np.int64) for name, value in feeds.items()})
        self.notes.write(json.dumps({"requests": len(requests), "rows": rows, "tokens": tokens, "profile": profile}))
        self.notes.write("\n")
        self.notes.flush()
        responses, start = [], 0
        for count, _ in shapes:
            parts = [pb_utils.Tensor(n, v[start : start + count]) for n, v in zip(self.outputs, made, strict=True)]
            responses.append(pb_utils.InferenceResponse(parts))
            start += count
        return responses
