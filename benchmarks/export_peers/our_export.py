"""This project's conversion alone, without the gate: `python -m benchmarks.export_peers.our_export MODEL OUT TASK`.

TASK is the export's task.json. Prints seconds as JSON, imports and loading apart, as for the peer.
"""

import json
import sys
import time
from pathlib import Path

from bertship.tasks import Task
from export.onnx_graph import export_onnx
from train.checkpoint import load_model
from train.heads import HEADS


def main() -> None:
    model_dir, out, task_file = map(Path, sys.argv[1:])
    task = Task.from_file(task_file)
    model, _ = load_model(HEADS[task.behaviour.head], model_dir, task.behaviour.width(task))
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    export_onnx(model, out / "model.onnx")
    sys.stdout.write(json.dumps({"export_s": time.monotonic() - started}) + "\n")


if __name__ == "__main__":
    main()
