"""optimum-onnx in its own environment: `python optimum_export.py MODEL OUT [--graphs]`, for sentences and pairs.

Converts as `optimum-cli export onnx` does, its validation left out of the time. With --graphs also its best for a CPU:
`model_optimized.onnx` (ONNX Runtime's fusions, level O3) and `model_quantized.onnx` (dynamic INT8 for AVX-512 VNNI, a
scale a column). Prints seconds and versions as JSON.
"""

import importlib.metadata
import json
import sys
import time
from pathlib import Path


def main() -> None:
    model_dir, out = Path(sys.argv[1]), Path(sys.argv[2])
    from optimum.exporters.onnx import export, main_export  # noqa: F401  (what main_export imports is not timed)

    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    main_export(str(model_dir), output=out, task="text-classification", do_validation=False)
    found = {"export_s": time.monotonic() - started}
    if "--graphs" in sys.argv:
        from optimum.onnxruntime import ORTModelForSequenceClassification, ORTOptimizer, ORTQuantizer
        from optimum.onnxruntime.configuration import AutoOptimizationConfig, AutoQuantizationConfig

        started = time.monotonic()
        model = ORTModelForSequenceClassification.from_pretrained(out)
        ORTOptimizer.from_pretrained(model).optimize(AutoOptimizationConfig.O3(), save_dir=out)
        found["optimize_s"] = time.monotonic() - started
        started = time.monotonic()
        recipe = AutoQuantizationConfig.avx512_vnni(is_static=False, per_channel=True)
        ORTQuantizer.from_pretrained(out, file_name="model.onnx").quantize(quantization_config=recipe, save_dir=out)
        found["quantize_s"] = time.monotonic() - started
    names = ("optimum", "optimum-onnx", "transformers", "torch", "onnx", "onnxruntime")
    print(json.dumps(found | {"versions": {name: importlib.metadata.version(name) for name in names}}))


if __name__ == "__main__":
    main()
