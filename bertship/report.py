"""One self-contained HTML page about a run: what was done, what came out, how to do it again. Light and dark.

Nothing in it is fetched from anywhere. Curves are drawn by matplotlib as SVG in the page's own colours, so a page
wants the `train` extra; without curves the standard library is enough.
"""

import html
import io
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
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
_INK = "#123456"  # what the page's own colour replaces
_FEW_POINTS = 20  # a curve of few has a mark at each
_MOST_POINTS = 1000  # a curve's points beyond are thinned out: a page of a million updates stays small


@dataclass(frozen=True)
class Curve:
    """`y` over `x`; points whose y is None or no number are left out."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]


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
        """A heading and a table; numbers are aligned to the right, floats with four digits."""
        head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
        body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
        noted = f'<p class="dim">{html.escape(note)}</p>' if note else ""
        self._parts.append(f"{_heading(heading)}<table><tr>{head}</tr>{body}</table>{noted}")
        return self

    def facts(self, heading: str, facts: Mapping[str, Any]) -> "Report":
        """A table of names and values; tables within tables get their names joined by dots."""
        return self.table(heading, ("", ""), list(_flat(facts)))

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
            body = "".join(
                f'<tr><td>{html.escape(name)}</td>{_cell(float(value))}<td><i style="width: '
                f'{min(100 * value / widest, 100):.1f}%"{" class=over" if value > widest else ""}></i></td></tr>'
                for name, value in bars
            )
            noted = f'<p class="dim">{html.escape(note)}</p>' if note else ""
            self._parts.append(f'{_heading(heading)}<table class="bars">{body}</table>{noted}')
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


def _cell(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"<td>{html.escape(str(value))}</td>"
    shown = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f'<td class="number">{shown}</td>'


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Sequence[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in facts.items():
        rows += _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(f"{prefix}{name}", value)]
    return rows


def _points(curve: Curve) -> tuple[list[float], list[float]]:
    kept = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if y is not None and abs(y) < float("inf")]
    every = max(1, -(-len(kept) // _MOST_POINTS))
    return [x for x, _ in kept[::every]], [y for _, y in kept[::every]]


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
            axes.plot(xs, ys, label=name, color=_COLOURS[number % len(_COLOURS)], linewidth=1.3, marker=marker)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.spines[["top", "right"]].set_visible(False)
        if logarithmic:
            axes.set_yscale("log")
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
