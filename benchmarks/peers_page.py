"""The page of `benchmarks/peers.py`: ratios first, what they rest on below, as HTML and as Markdown."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertship.artifacts import write_text
from bertship.report import Report

QUICK = (
    "A quick run, which only shows that every step works: it measured next to nothing, on a model that learnt next to "
    "nothing. Its figures say nothing about anybody."
)
BUSY = "The machine was busy when this began (load {load} on {cores} cores): paired ratios suffer less, times do."


@dataclass(frozen=True)
class Ratio:
    """How many times better ours is by `what`, over paired rounds; below 1 the peer is better."""

    ours: str
    peer: str
    what: str
    median: float
    least: float
    most: float
    rounds: int

    def sentence(self) -> str:
        """In words; a spread that has 1 in it decides nothing."""
        span = f"{self.least:.2f} to {self.most:.2f} over {self.rounds} paired round{'s' * (self.rounds != 1)}"
        better = "as good as" if self.least <= 1 <= self.most and self.rounds > 1 else "better than"
        if better == "better than" and self.median < 1:
            better = "worse than"
        return f"{self.ours} is {better} {self.peer} by {self.what}: {self.median:.2f} times ({span})."


@dataclass(frozen=True)
class Part:
    """A comparison, or why there is none: `absent` names peers that are missing, `failed` says what went wrong."""

    name: str
    what: str
    answers: Sequence[tuple[str, str]] = ()
    answers_note: str = ""
    figures: Sequence[tuple[str, str, str]] = ()
    ratios: Sequence[Ratio] = ()
    absent: Sequence[str] = ()
    failed: str = ""
    raw: Mapping[str, Any] = field(default_factory=dict)
    measured: str = ""  # when, in UTC
    load: float = 0.0  # of the machine before it

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> "Part":
        return cls(**{**facts, "ratios": [Ratio(**ratio) for ratio in facts["ratios"]]})

    def when(self) -> str:
        return f"Measured {self.measured}, load before it {self.load:g}."

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def missing(self) -> list[str]:
        """What is not there, and why."""
        said = [f"{self.name}: not measured, {self.failed}"] if self.failed else []
        return said + [f"{self.name}: without a peer, {line}" for line in self.absent]


def write(result: Mapping[str, Any], parts: Sequence[Part], home: Path) -> None:
    """`report.html`, `report.md` and `results.json` in `home`."""
    write_text(home / "results.json", json.dumps(result, indent=2, default=str) + "\n")
    write_text(home / "report.md", markdown(result, parts))
    page(result, parts).write(home / "report.html")


def page(result: Mapping[str, Any], parts: Sequence[Part]) -> Report:
    made = Report("bertship beside its peers", _what(result))
    made.text("Conclusions", *_warnings(result), *_conclusions(result, parts))
    made.bars(
        "Ratios",
        [(f"{part.name}: {r.ours} / {r.peer}, {r.what}", r.median) for part in parts for r in part.ratios],
        note="Medians of paired rounds: above 1 ours is better.",
    )
    made.table("Ratios and their spreads", _RATIO_HEAD, [row for part in parts for row in _ratio_rows(part)])
    for part in parts:
        if part.what:
            made.text(part.name.capitalize(), part.what, part.when())
            made.table("Answers, compared first", ("", ""), part.answers, part.answers_note)
            made.table("Measured", ("", "median (least to most)", ""), part.figures)
    made.facts("Machine", {n: v for n, v in result["machine"].items() if n not in ("versions", "gpus")})
    made.facts("Versions here", result["machine"]["versions"])
    made.facts("The peers' environments", _environments(result))
    made.command("Reproduce", "make bench-peers" + (" QUICK=1" if result["quick"] else ""))
    return made


def markdown(result: Mapping[str, Any], parts: Sequence[Part]) -> str:
    lines = ["# bertship beside its peers", "", _what(result), ""]
    lines += [f"**{line}**\n" for line in _warnings(result)]
    lines += [f"- {line}" for line in _conclusions(result, parts)]
    lines += ["", "## Ratios", "", *_table(_RATIO_HEAD, [row for part in parts for row in _ratio_rows(part)])]
    for part in parts:
        if part.what:
            lines += [
                "",
                f"## {part.name.capitalize()}",
                "",
                part.what,
                part.when(),
                "",
                f"Answers first. {part.answers_note}",
                "",
            ]
            lines += [*_table(("", "answers"), part.answers), ""]
            lines += _table(("", "median (least to most)", ""), part.figures)
    lines += ["", "## Machine and versions", ""]
    facts = {n: v for n, v in result["machine"].items() if n not in ("versions", "gpus")}
    lines += _table(("", ""), [*facts.items(), *result["machine"]["versions"].items()])
    lines += ["", *_table(("environment", "versions"), list(_environments(result).items())), ""]
    return "\n".join(lines)


_RATIO_HEAD = ("part", "ours", "peer", "by", "median", "least", "most", "rounds")


def _ratio_rows(part: Part) -> list[tuple[Any, ...]]:
    rows = [dataclasses.astuple(ratio) for ratio in part.ratios]
    return [(part.name, *row[:3], *(f"{value:.2f}" for value in row[3:6]), row[6]) for row in rows]


def _what(result: Mapping[str, Any]) -> str:
    machine = result["machine"]
    return (
        f"Training, export and serving with the same weights, texts and threads, in turns, on {machine['cores']} cores "
        f"of {machine['processor']}, {machine['measured']}."
    )


def _conclusions(result: Mapping[str, Any], parts: Sequence[Part]) -> list[str]:
    """What is missing first, then the ratios in words, unless they mean nothing."""
    ratios = [f"{part.name}: {ratio.sentence()}" for part in parts for ratio in part.ratios]
    return [line for part in parts for line in part.missing()] + ([] if result["quick"] else ratios)


def _warnings(result: Mapping[str, Any]) -> list[str]:
    machine = result["machine"]
    busy = machine["load_before"] > machine["cores"] / 2
    told = BUSY.format(load=machine["load_before"], cores=machine["cores"])
    return ([QUICK] if result["quick"] else []) + ([told] if busy else [])


def _environments(result: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: f"could not be installed: {found}"
        if isinstance(found, str)
        else ", ".join(f"{n} {v}" for n, v in found.items())
        for name, found in result["environments"].items()
    }


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    cells = [[str(value).replace("|", "\\|") for value in row] for row in rows]
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in cells)]
