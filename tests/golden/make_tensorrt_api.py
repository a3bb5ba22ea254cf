"""Write `tensorrt_api.json`: the public names of TensorRT's Python bindings, asked of the bindings themselves.

`python tests/golden/make_tensorrt_api.py 10.16.1.11 11.4.0.106`, with Python 3.11 and gcc. The bindings' wheels hold no
TensorRT, and TensorRT cannot be installed everywhere; but a name is registered when the bindings are imported, before
any of the library is called. So empty libraries of the right names let them be imported and asked. Nothing is run.
"""

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "tensorrt-cu12-bindings"
LIBRARIES = ("nvinfer", "nvinfer_plugin", "nvonnxparser")
CLASSES = (  # besides the module itself
    "Builder",
    "DataType",
    "IBuilderConfig",
    "ICudaEngine",
    "IExecutionContext",
    "IHostMemory",
    "ILogger",
    "INetworkDefinition",
    "IOptimizationProfile",
    "IProgressMonitor",
    "ITensor",
    "ITimingCache",
    "Logger",
    "MemoryPoolType",
    "NetworkDefinitionCreationFlag",
    "OnnxParser",
    "ParserError",
    "ProfilingVerbosity",
    "Runtime",
    "TensorIOMode",
)
ASK = """
import json, sys
sys.path.insert(0, sys.argv[1])
import tensorrt_bindings as tensorrt
def names(thing):
    return sorted(n for n in dir(thing) if n == "__init__" or not n.startswith("_"))
print(json.dumps({c: names(getattr(tensorrt, c) if c else tensorrt) for c in ["", *sys.argv[2:]]}))
"""


def ask(version: str) -> dict[str, list[str]]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", place]
        subprocess.run([*download, f"{WHEEL}=={version}"], check=True)
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            wheel.extractall(folder)
        bindings = folder / "tensorrt_bindings" / "tensorrt.so"
        wanted = subprocess.run(["nm", "-D", "--undefined-only", bindings], check=True, capture_output=True, text=True)
        functions = re.findall(r"U (\w*(?:INTERNAL|Nv\w+|Plugin\w*))$", wanted.stdout, re.M)
        source = "".join(f"void *{name}(void) {{ return 0; }}\n" for name in functions)
        for library in LIBRARIES:
            name = f"lib{library}.so.{version.partition('.')[0]}"
            build = ["gcc", "-shared", "-x", "c", "-", "-o", folder / name, f"-Wl,-soname,{name}"]
            subprocess.run(build, input=source, text=True, check=True)
        command = [sys.executable, "-c", ASK, folder, *CLASSES]
        asked = subprocess.run(
            command, check=True, capture_output=True, text=True, env={"LD_LIBRARY_PATH": place, "PATH": "/usr/bin:/bin"}
        )
        return json.loads(asked.stdout)


if __name__ == "__main__":
    table = {version: {"source": f"{WHEEL}=={version}", "names": ask(version)} for version in sys.argv[1:]}
    Path(__file__).with_name("tensorrt_api.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
