"""The measured figures of `export/tolerances.py`: what honest artifacts of trained models depart by.

`python -m benchmarks.tolerances EXPORT_DIR...` judges each export again and prints, for each precision, the largest
difference of a logit and the smallest agreement over all modes, and the largest difference of a hidden state over rows
of all lengths, beside what is allowed. The hidden states of "fp16" are those of PyTorch in half precision.
"""

import argparse
import copy
import json
import sys
from collections import defaultdict
from pathlib import Path

from bertship.artifacts import read_manifest, versions
from bertship.tasks import Task
from bertship.tasks.base import Kind
from bertship.tokenization import Tokenizer, pad
from export.layers import differences, graph_hidden, torch_hidden
from export.parity import rows_of_all_lengths
from export.stages import check_parity, model_of
from export.tolerances import TOLERANCES
from train.data import load_examples


def measure(export: Path, data: str | None) -> dict[str, dict[str, float]]:
    """By precision: the worst of one export."""
    manifest = read_manifest(export, "export")
    task, tokenizer = Task.from_file(export / "task.json"), Tokenizer.from_file(export / "tokenizer.json")
    model = model_of(export, manifest, task, None)
    found: dict[str, dict[str, float]] = defaultdict(lambda: {"difference": 0.0, "agreement": 1.0, "layer": 0.0})
    for result in check_parity(export, data, report)["metrics"]["parity"]:
        worst = found[result["precision"]]
        worst["difference"] = max(worst["difference"], result["max_difference"])
        worst["agreement"] = min(worst["agreement"], result["agreement"])
    examples = load_examples(task, data or manifest["inputs"].get("data"), "dev", report)
    kind: Kind = task.behaviour
    columns = {name: [e.columns[name] for e in examples] for name in kind.inputs + kind.annotations}
    half = copy.deepcopy(model).half()
    for row in rows_of_all_lengths(kind.encode(task, tokenizer, columns).rows):
        feeds = pad([row], tokenizer.pad_id)
        wanted = torch_hidden(model, feeds)
        for precision, file in manifest["graphs"].items():
            got = [graph_hidden(export / file, model, feeds)]
            if precision == "fp16":
                got.append(torch_hidden(half, feeds))
            shares = [
                share for hidden in got for share in differences(wanted, hidden, feeds["attention_mask"]).values()
            ]
            found[precision]["layer"] = max(found[precision]["layer"], *shares)
    return found


def report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("exports", nargs="+", type=Path, metavar="EXPORT_DIR[=DATA]")
    arguments = parser.parse_args()
    table = {}
    for named in arguments.exports:
        place, _, data = str(named).partition("=")
        table[place] = measure(Path(place), data or None)
        for precision, worst in table[place].items():
            allowed = TOLERANCES[precision]
            print(
                f"{place} {precision}: difference {worst['difference']:.1e} (allowed {allowed.max_difference:g}), "
                f"agreement {worst['agreement']:.2%} ({allowed.agreement:.1%}), "
                f"layer {worst['layer']:.1e} ({allowed.layer:g})",
                flush=True,
            )
    print(json.dumps({"versions": versions(), "measured": table}))
