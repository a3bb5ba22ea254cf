"""One self-contained HTML page about a run: what was done, what came out, how to do it again. Light and dark.

Nothing in it is fetched from anywhere. Curves are drawn by matplotlib as SVG in the page's own colours, so a page
wants the `train` extra; without curves the standard library is enough.
"""

import html
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertship.artifacts import write_text
from bertship.shell import typed

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1e; --paper: #ffffff; --line: #d5d5da; --dim: #65656b; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e9e9ee; --paper: #17171a; --line: #3c3c42; --dim: #9d9da6; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .8rem .25rem 0; text-align: left;
  font-variant-numeric: tabular-nums; }
td.number, th.number { text-align: right; }
figure { margin: 1rem 0; } figcaption, .dim { color: var(--dim); }
svg { width: 100%; height: auto; }
table.bars td:last-child { width: 16rem; padding-right: 0; }
table.bars i { display: block; height: .7rem; background: #0072b2; min-width: 1px; }
table.bars i.over { background: #d55e00; }
pre { border: 1px solid var(--line); padding: .6rem; overflow-x: auto; }
"""
# Colours that are told apart by most people with a colour vision deficiency (Okabe and Ito 2008), on white and black.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
_INK = "#123456"  # what the page's own colour replaces
_FEW_POINTS = 20  # a curve of few has a mark at each
_DECIMALS = 4  # at most, in a column
_SPREAD = 1e4  # the largest over the smallest of a column: beyond, one number of digits serves neither
_NUMBER = re.compile(r"[+-]?[\d,]*\.?\d+(e[+-]?\d+)?%?")
_MOST_POINTS = 1000  # a curve's points beyond are thinned out: a page of a million updates stays small
_WINDOWS = 50  # of a noisy curve


@dataclass(frozen=True)
class Curve:
    """`y` over `x`; points whose y is None or no number are left out."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]

    def smoothed(self) -> "Curve":
        """Means over _WINDOWS windows of points, each at its last one: a curve rather than a cloud."""
        points = [(x, y) for x, y in zip(self.x, self.y, strict=True) if y is not None]
        size = max(1, len(points) // _WINDOWS)
        windows = [points[start : start + size] for start in range(0, len(points), size)]
        return Curve(self.name, [w[-1][0] for w in windows], [sum(y for _, y in w) / len(w) for w in windows])


@dataclass
class Report:
    """A page, built from above: `title`, one sentence of what was run, then what is added, in that order."""

    title: str
    what: str
    _parts: list[str] = field(default_factory=list)

    def text(self, heading: str, *paragraphs: str) -> "Report":
        """A heading and plain paragraphs."""
        self._parts.append(_heading(heading) + "".join(f"<p>{html.escape(p)}</p>" for p in paragraphs))
        return self

    def table(self, heading: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], note: str = "") -> "Report":
        """A heading and a table; `note` is shown below, line by line.

        A column of numbers is aligned to the right, with its heading, and has one number of decimals; any other column
        is aligned to the left.
        """
        self._parts.append(_heading(heading) + _table(columns, rows, note))
        return self

    def facts(self, heading: str, facts: Mapping[str, Any]) -> "Report":
        """A table of names and values; tables within tables get their names joined by dots, empty ones are left out."""
        rows = [
            (name, value)
            for name, value in _flat(facts)
            if value is not None and not (isinstance(value, str) and not value.strip())
        ]
        return self.table(heading, (), rows) if rows else self

    def curves(self, heading: str, curves: Sequence[Curve], x: str, y: str, logarithmic: bool = False) -> "Report":
        """A heading and a chart of `curves`, axes named `x` and `y`; nothing where no curve has a point."""
        drawn = _draw(curves, x, y, logarithmic)
        if drawn:
            self._parts.append(f"{_heading(heading)}<figure>{drawn}</figure>")
        return self

    def bars(
        self, heading: str, bars: Sequence[tuple[str, float]], full: float | None = None, note: str = ""
    ) -> "Report":
        """A heading and horizontal bars of values not below 0; nothing where there is none.

        A bar as wide as the column is `full`, by default the largest value; bars beyond it have another colour.
        """
        if bars:
            widest = full or max(value for _, value in bars) or 1.0
            shown = _column([float(value) for _, value in bars])
            body = "".join(
                f'<tr><td>{html.escape(name)}</td><td class="number">{cell}</td><td>{_bar(value / widest)}</td></tr>'
                for (name, value), cell in zip(bars, shown, strict=True)
            )
            self._parts.append(f'{_heading(heading)}<table class="bars">{body}</table>{_note(note)}')
        return self

    def command(self, heading: str, *lines: str) -> "Report":
        """A heading and lines for a shell, as `bertship.shell.typed` has them; nothing where there is none."""
        if lines:
            self._parts.append(f"{_heading(heading)}<pre>{html.escape(chr(10).join(map(typed, lines)))}</pre>")
        return self

    def html(self) -> str:
        """The page."""
        title = html.escape(self.title)
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<style>{_STYLE}</style></head><body><h1>{title}</h1><p>{html.escape(self.what)}</p>"
            f"{''.join(self._parts)}</body></html>\n"
        )

    def write(self, path: Path) -> None:
        """Write the page to `path`, whole or not at all."""
        write_text(path, self.html())


def _heading(text: str) -> str:
    return f"<h2>{html.escape(text)}</h2>" if text else ""


def _bar(share: float) -> str:
    """A bar of so much of the column, in another colour where it is more than that; none for 0."""
    if not share:
        return ""
    return f'<i style="width: {min(100 * share, 100):.1f}%"{" class=over" if share > 1 else ""}></i>'


def _note(note: str) -> str:
    return f'<p class="dim">{"<br>".join(map(html.escape, note.splitlines()))}</p>' if note else ""


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]], note: str) -> str:
    places = range(max(map(len, rows), default=len(columns)))
    values = [[row[place] for row in rows] for place in places]
    kinds = [' class="number"' if _numeric(column) else "" for column in values]
    head = "".join(f"<th{kind}>{html.escape(name)}</th>" for name, kind in zip(columns, kinds, strict=False))
    lines = zip(*map(_column, values), strict=True)
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, line, strict=True)) + "</tr>"
        for line in lines
    )
    return f"<table>{f'<tr>{head}</tr>' if columns else ''}{body}</table>{_note(note)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numeric(column: Sequence[Any]) -> bool:
    """Whether all of a column's cells are numbers, in words or not; empty ones do not count."""
    told = [value for value in column if value != ""]
    return bool(told) and all(_is_number(v) or (isinstance(v, str) and _NUMBER.fullmatch(v)) for v in told)


def _column(column: Sequence[Any]) -> list[str]:
    """A column's cells as HTML: where it has a float, its numbers have as many decimals as its smallest one needs.

    Numbers among words, and those of a column that spans many magnitudes, are each of a kind of their own, with four
    digits.
    """
    sizes = [abs(value) for value in column if _is_number(value) and value and math.isfinite(value)]
    together = _numeric(column) and any(isinstance(value, float) for value in column)
    if not together or not sizes or max(sizes) > _SPREAD * min(sizes) or max(sizes) < 10**-_DECIMALS:
        return [html.escape(_alone(value)) for value in column]
    if max(sizes) <= 1:
        # shares and the like; of smaller ones as many as they need
        decimals = max(_DECIMALS, 2 - math.floor(math.log10(max(sizes))))
    else:
        needed = (3 - math.floor(math.log10(max(sizes))), 2 - math.floor(math.log10(min(sizes))), 0)
        decimals = min(_DECIMALS, max(needed))
    return [html.escape(f"{value:,.{decimals}f}" if _is_number(value) else str(value)) for value in column]


def _alone(value: Any) -> str:
    if not isinstance(value, float):
        return f"{value:,}" if _is_number(value) else str(value)
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _flat(facts: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Names and plain values; lists in words, and tables in lists as tables, numbered where there are several."""
    rows: list[tuple[str, Any]] = []
    for name, value in facts.items():
        if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            value = {"": value[0]} if len(value) == 1 else dict(enumerate(value))
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{name}." if name != "" else prefix)
        else:
            rows.append((f"{prefix}{name}", ", ".join(map(str, value)) if isinstance(value, list | tuple) else value))
    return rows


def _points(curve: Curve) -> tuple[list[float], list[float]]:
    kept = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if y is not None and abs(y) < float("inf")]
    every = max(1, -(-len(kept) // _MOST_POINTS))
    return [x for x, _ in kept[::every]], [y for _, y in kept[::every]]


def plain_numbers(axis: Any) -> None:
    """Of matplotlib's logarithmic `axis`: 60, not 6 x 10^1."""
    from matplotlib.ticker import LogFormatter

    for use in (axis.set_major_formatter, axis.set_minor_formatter):
        use(LogFormatter(minor_thresholds=(2, 0.5)))


def _draw(curves: Sequence[Curve], x: str, y: str, logarithmic: bool) -> str:
    """The chart as an SVG element, in the page's colour; empty where there is nothing to draw."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    points = [(curve.name, *_points(curve)) for curve in curves]
    if not any(xs for _, xs, _ in points):
        return ""
    inked = ("text.color", "xtick.color", "ytick.color", "axes.edgecolor", "axes.labelcolor")
    settings: Any = {"svg.hashsalt": "report"} | dict.fromkeys(inked, _INK)
    with rc_context(settings):
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        axes = figure.subplots()
        for number, (name, xs, ys) in enumerate(points):
            marker = "o" if len(xs) <= _FEW_POINTS else None
            axes.plot(xs, ys, label=name, color=COLOURS[number % len(COLOURS)], linewidth=1.3, marker=marker)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.spines[["top", "right"]].set_visible(False)
        if logarithmic:
            axes.set_yscale("log")
            plain_numbers(axes.yaxis)
        if len(points) > 1:
            axes.legend(frameon=False)
        figure.patch.set_alpha(0)
        axes.patch.set_alpha(0)
        drawn = io.StringIO()
        FigureCanvasSVG(figure).print_svg(drawn, metadata={"Date": None, "Creator": None})
    figure.clear()
    element = drawn.getvalue()
    element = re.sub(r"<metadata>.*?</metadata>", "", element[element.index("<svg") :], flags=re.DOTALL)
    return re.sub(_INK, "currentColor", element, flags=re.IGNORECASE)
