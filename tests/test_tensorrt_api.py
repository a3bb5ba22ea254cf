"""Every TensorRT name that is used exists in TensorRT 10.16, 11.4 and RTX: asked of their own bindings.

`golden/tensorrt_api.json` holds the public names of the bindings' wheels; `golden/make_tensorrt_api.py` made it.
A name that exists says nothing of what it does.
"""

import ast
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
API = json.loads((ROOT / "tests" / "golden" / "tensorrt_api.json").read_text(encoding="utf-8"))
SOURCES = ("export/tensorrt_engine.py", "bertship/tensorrt_runner.py")  # no other module touches it
# what the sources call the objects: an attribute of such a name is a name of TensorRT's
CLASS_OF = {
    "trt": "",
    "builder": "Builder",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "config": "IBuilderConfig",
    "profile": "IOptimizationProfile",
    "cache": "ITimingCache",
    "plan": "IHostMemory",
    "error": "ParserError",
    "engine": "ICudaEngine",
    "context": "IExecutionContext",
    "runtime": "Runtime",
}
ONLY_RTX = {
    ("", "ComputeCapability"),  # full TensorRT builds for the GPU that is there
    ("IBuilderConfig", "num_compute_capabilities"),
    ("IBuilderConfig", "set_compute_capability"),
}


def chain(node: ast.AST) -> list[str]:
    """`trt.ILogger.ERROR` as ["trt", "ILogger", "ERROR"]; empty for what does not begin with a name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        # `self._engine` is an engine too
        return [node.id, *names] if node.id != "self" else [name.lstrip("_") for name in names]
    return []


def used() -> dict[tuple[str, str], str]:
    """Each (class, name) that the sources use, and where."""
    found = {}
    for source in SOURCES:
        for node in ast.walk(ast.parse((ROOT / source).read_text(encoding="utf-8"))):
            names = chain(node)
            if len(names) < 2 or names[0] not in CLASS_OF:
                continue
            where = f"{source}:{getattr(node, 'lineno', 0)}"
            found[CLASS_OF[names[0]], names[1]] = where
            if names[0] == "trt" and len(names) > 2:  # a member of one of the module's classes
                found[names[1], names[2]] = where
    return {key: where for key, where in found.items() if not key[1].startswith("__")}


USED = used()


def test_the_search_finds_what_is_there():
    assert {
        ("Builder", "build_serialized_network"),
        ("IBuilderConfig", "add_optimization_profile"),
        ("IBuilderConfig", "progress_monitor"),
        ("IBuilderConfig", "set_timing_cache"),
        ("ICudaEngine", "create_execution_context"),
        ("IExecutionContext", "execute_async_v3"),
        ("IExecutionContext", "set_tensor_address"),
        ("MemoryPoolType", "WORKSPACE"),
        ("OnnxParser", "parse_from_file"),
        ("NetworkDefinitionCreationFlag", "STRONGLY_TYPED"),
        ("", "Runtime"),
    } <= set(USED)


@pytest.mark.parametrize("version", API)
def test_every_name_is_in_the_bindings(version):
    names = API[version]["names"]
    missing = {
        f"{kind or 'tensorrt'}.{name} ({where})"
        for (kind, name), where in USED.items()
        if (kind, name) not in ONLY_RTX and kind in names and name not in names[kind]
    }
    unknown = {kind for kind, _ in USED if kind not in names and (kind, "") not in ONLY_RTX} - {"ComputeCapability"}
    assert not missing
    assert not unknown, "classes that the table lacks: add them to make_tensorrt_api.py"


def test_every_name_that_building_takes_is_in_rtx():
    rtx = pytest.importorskip("tensorrt_rtx", reason="pip install -c requirements/constraints.txt tensorrt-rtx-cu12")
    for (kind, name), where in USED.items():
        if kind == "" and name == "Logger":
            continue
        thing = getattr(rtx, kind) if kind else rtx
        assert hasattr(thing, name), f"{kind}.{name} ({where})"


@pytest.mark.parametrize("version", API)
def test_names_of_another_version_are_missed(version):
    """The table can say no: what TensorRT 11 removed is there in 10 alone, and execute_v2's elders in neither."""
    names = API[version]["names"]
    assert ("EXPLICIT_BATCH" in names["NetworkDefinitionCreationFlag"]) == version.startswith("10.")
    assert ("platform_has_fast_fp16" in names["Builder"]) == version.startswith("10.")
    assert "execute_async_v2" not in names["IExecutionContext"]
