"""Documents to ids: MB of text a second and the peak of memory, beside the tokenizer alone.

    python -m benchmarks.corpus --megabytes 150 FILE.jsonl ...

The files' documents are repeated until there is enough text, with some of the words changed in each copy, since new
text has new words: `--changed` is their share (in English prose of this size, about one word in 25 is seen for the
first time). Measured, one after another:

    given       `bertship corpus` with a tokenizer
    trained     `bertship corpus` with a vocabulary of its own
    tokenizer   encode_batch_fast of `tokenizers` over whole documents, on all cores: no sentences, nothing written

Seconds are those of the clock; beside them stand those of the processors, summed over all processes, which other work
on the machine disturbs less. Memory is that of all processes together, shared pages counted once (PSS), looked at ten
times a second. Results go to benchmarks/results/corpus.json.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.machine import describe_machine, save_result
from bertship.config import CorpusConfig
from bertship.tokenization import Tokenizer
from train.corpus import read_documents, train_vocabulary

VOCAB_SIZE = 30_528
ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="documents of any kind that `bertship corpus` reads")
    parser.add_argument("--megabytes", type=int, default=150)
    parser.add_argument("--changed", type=float, default=0.04)
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--format", choices=["jsonl", "txt"], default="jsonl")
    parser.add_argument("--only", default="given,trained,tokenizer")
    options = parser.parse_args()
    texts = [text for file in options.files for text in read_documents(file)]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / f"documents.{options.format}"
        size = write_source(source, texts, options.megabytes * 1_000_000, options.changed)
        tokenizer_dir = Path(folder) / "tokenizer"
        tokenizer_dir.mkdir()
        train_vocabulary(texts, VOCAB_SIZE, lowercase=True).save(tokenizer_dir)
        result: dict[str, Any] = {
            "megabytes": size / 1e6,
            "changed_words": options.changed,
            "format": options.format,
            "figures": {},
            "machine": describe_machine(),
        }
        for name in options.only.split(","):
            load = os.getloadavg()[0]
            if name == "tokenizer":
                figures = tokenizer_alone(source, tokenizer_dir)
            else:
                figures = build(source, tokenizer_dir if name == "given" else None, options.workers)
            figures["megabytes_per_s"] = size / 1e6 / figures["seconds"]
            figures["megabytes_per_cpu_s"] = size / 1e6 / figures["cpu_seconds"]
            figures["load_before"] = load
            result["figures"][name] = figures
            print(
                f"{name:<10} {figures['megabytes_per_s']:6.1f} MB/s, "
                f"{figures['megabytes_per_cpu_s']:.1f} MB a processor second, "
                f"peak {figures['peak_mib']:,.0f} MiB, load before {load:.1f}",
                flush=True,
            )
    print(f"kept in {save_result('corpus', f'{options.format} {options.megabytes} MB', result)}")


def write_source(path: Path, texts: list[str], wanted: int, changed: float) -> int:
    """Copies of `texts`, each with other words changed; returns the bytes of text."""
    rng = random.Random(1)
    size = 0
    with path.open("w", encoding="utf-8") as file:
        while size < wanted:
            for text in texts:
                words = text.split(" ")
                for place in rng.sample(range(len(words)), int(changed * len(words))):
                    words[place] = changed_word(words[place], rng)
                text = " ".join(words)
                file.write(
                    json.dumps({"text": text}, ensure_ascii=False) + "\n" if "json" in path.name else f"{text}\n\n"
                )
                size += len(text.encode())
                if size >= wanted:
                    break
    return size


def changed_word(word: str, rng: random.Random) -> str:
    """Two letters more, somewhere: a word of the same kind that was not there before."""
    place = rng.randint(0, len(word))
    return word[:place] + rng.choice("aeiou") + rng.choice("bcdfghklmnprst") + word[place:]


def tokenizer_alone(source: Path, tokenizer_dir: Path) -> dict[str, float]:
    backend = Tokenizer.from_dir(tokenizer_dir).backend
    seconds = cpu_seconds = peak = 0.0
    for batch in batches(read_documents(source)):
        started, cpu_started = time.perf_counter(), time.process_time()
        backend.encode_batch_fast(batch, add_special_tokens=False)
        seconds += time.perf_counter() - started
        cpu_seconds += time.process_time() - cpu_started
        peak = max(peak, memory(psutil.Process()))
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_mib": peak / 2**20}


def batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if sum(map(len, batch)) > 4_000_000:
            yield batch
            batch = []
    yield batch


def build(source: Path, tokenizer_dir: Path | None, workers: int | None) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, "-c", "import sys; from bertship.cli import main; sys.exit(main())", "corpus"]
        command += [str(source), "--runs", runs, "--set", f"vocab_size={VOCAB_SIZE}"]
        command += ["--tokenizer", str(tokenizer_dir)] if tokenizer_dir else []
        command += ["--workers", str(workers)] if workers is not None else []
        started, cpu_started = time.perf_counter(), children_cpu()
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )
        peak = 0
        while process.poll() is None:
            peak = max(peak, memory(psutil.Process(process.pid)))
            time.sleep(0.1)
        if process.returncode:
            raise SystemExit(f"bertship corpus failed with exit code {process.returncode}")
        return {
            "seconds": time.perf_counter() - started,
            "cpu_seconds": children_cpu() - cpu_started,
            "peak_mib": peak / 2**20,
        }


def children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def memory(process: psutil.Process) -> int:
    """Bytes of a process and its children, shared pages counted once."""
    total = 0
    try:
        for one in [process, *process.children(recursive=True)]:
            total += one.memory_full_info().pss
    except psutil.Error:
        pass  # it has just ended
    return total


if __name__ == "__main__":
    assert CorpusConfig(vocab_size=VOCAB_SIZE)
    main()
