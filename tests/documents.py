"""Documents of several kinds, for tests of what builds a corpus."""

import gzip
import json
import random
from pathlib import Path

WORDS = ["river", "stone", "walks", "over", "naïve", "the", "green", "seven", "lamp", "old", "singing", "houses", "四"]


def write_sources(folder: Path, documents: int = 600) -> list[Path]:
    """A text, JSON Lines and a packed text, with a document that is longer than several chunks."""
    rng = random.Random(1)
    texts = [
        "\n".join(
            f"{' '.join(rng.choices(WORDS, k=12))} number {number}. It is {rng.choice(WORDS)}!"
            for _ in range(rng.randint(1, 9) if number % 300 else 4000)
        )
        for number in range(documents)
    ]
    folder.mkdir(exist_ok=True)
    third = documents // 3
    (folder / "a.txt").write_text("\n\n".join(texts[:third]), "utf-8")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[third : 2 * third])
    (folder / "b.jsonl").write_text(lines, "utf-8")
    (folder / "c.txt.gz").write_bytes(gzip.compress("\n\n".join(texts[2 * third :]).encode()))
    return sorted(folder.iterdir())


def files_of(out: Path) -> dict[str, bytes]:
    return {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }
