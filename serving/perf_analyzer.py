"""Triton's own load generator, as a function: one run, one row of figures.

perf_analyzer measures in windows and by default goes on until three of them in a row agree; on a shared machine they
may never, and then it writes nothing. Here it takes exactly three windows, whatever they are, and reports all their
requests together; the throughput of each window is kept, so that a reader of the figures sees how steady they are.
`--request-count` would be simpler, but its figures are wrong.
"""

import csv
import io
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertship.client import Client
from bertship.errors import CheckFailed, InputError, ServerUnavailable, seen

WINDOWS = 3  # it judges the last three and reports them together; with fewer it reports nothing
STRETCH = 1.2  # it takes windows longer than asked, by this factor
ANY_DEVIATION = 1_000_000  # per cent: every measurement is stable enough
MAX_WINDOW_S = 60.0
PERCENTILES = (50, 90, 95, 99)
OPEN_CLIENTS = 64  # threads that an open-loop run may have waiting; more requests than that at once are delayed

_CSV_COLUMNS = {
    "Inferences/Second": ("throughput_per_s", 1.0),
    "Avg latency": ("mean_ms", 1e-3),
    **{f"p{p} latency": (f"p{p}_ms", 1e-3) for p in PERCENTILES},
}
_NO_REQUESTS = "No valid requests recorded"
_NONE_AT_ALL = "failed to find the requested model version"  # of a model that has had no request yet


@dataclass(frozen=True)
class Load:
    """So many clients, each with one request at a time (closed loop); or so many requests a second (open loop).

    Open-loop requests come as a Poisson process: whether earlier ones are answered or not.
    """

    concurrency: int | None = None
    rate_per_s: float | None = None

    def __str__(self) -> str:
        return f"{self.concurrency} at once" if self.concurrency else f"{self.rate_per_s:g} a second"

    @property
    def flags(self) -> tuple[str, ...]:
        if self.concurrency:
            return ("--concurrency-range", str(self.concurrency))
        distribution = ("--request-distribution", "poisson", "--max-threads", str(OPEN_CLIENTS))
        return ("--request-rate-range", f"{self.rate_per_s:g}", *distribution)


def parse_csv(text: str) -> dict[str, float]:
    """Throughput and latencies of perf_analyzer's report of one run. Raises CheckFailed where it is no such report."""
    rows = list(csv.DictReader(io.StringIO(text)))
    try:
        (row,) = rows
        return {name: round(float(row[column]) * scale, 6) for column, (name, scale) in _CSV_COLUMNS.items()}
    except (KeyError, TypeError, ValueError):
        wanted = ", ".join(_CSV_COLUMNS)
        raise CheckFailed(f"perf_analyzer's report is {seen(text, 200)}: one row with {wanted} was expected") from None


class PerfAnalyzer:
    """The program with the texts that it sends, both in `folder`, which is the caller's to remove."""

    settings = ("-s", str(ANY_DEVIATION), "-r", str(WINDOWS), "--verbose-csv", "-v")

    def __init__(
        self,
        program: Path,
        addresses: Mapping[str, str],
        model: str,
        folder: Path,
        entries: Sequence[Mapping[str, Any]],
    ) -> None:
        self._program, self._addresses, self._model = program, addresses, model
        self._input, self._report = folder / "input.json", folder / "report.csv"
        self._input.write_text(json.dumps({"data": entries}), encoding="utf-8")
        # libcurl and gRPC would ask a proxy for the server
        self._variables = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}

    def run(self, protocol: str, load: Load, seconds: float) -> dict[str, Any]:
        """Measure for `seconds`, doubled while no request ends in a window. Raises CheckFailed, ServerUnavailable."""
        window_s = seconds / WINDOWS
        where = f"{self._model} over {protocol} at {self._addresses[protocol]}, {load}"
        while True:
            status, output, errors = self._call(protocol, load, window_s, where)
            if status == 0 and self._report.exists():
                break
            said = [line.strip() for line in (output + "\n" + errors).splitlines() if line.strip()]
            reason = said[-1] if said else f"ended with status {status}"
            if _NO_REQUESTS not in errors and _NONE_AT_ALL not in reason:
                with Client(f"http://{self._addresses['http']}") as client:
                    kind = CheckFailed if client.ready(self._model) else ServerUnavailable
                raise kind(f"perf_analyzer on {where}: {reason}")
            window_s *= 2
            if window_s > MAX_WINDOW_S:
                raise CheckFailed(f"perf_analyzer on {where}: no answer within {window_s / 2:.0f} s")
        return {
            **parse_csv(self._report.read_text(encoding="utf-8")),
            "requests": int(_found(r"^ *Request count: (\d+)", output)[0]),
            "seconds": round(window_s * WINDOWS, 3),
            "windows_per_s": [float(rate) for rate in _found(r"Pass \[\d+\] throughput: ([\d.]+)", output)],
        }

    def _call(self, protocol: str, load: Load, window_s: float, where: str) -> tuple[int, str, str]:
        self._report.unlink(missing_ok=True)
        command = [
            *(str(self._program), "-m", self._model, "-i", protocol, "-u", self._addresses[protocol]),
            *("--input-data", str(self._input), "-f", str(self._report), *load.flags),
            *("-p", str(max(1, round(window_s * 1e3 / STRETCH))), *self.settings),
        ]
        timeout_s = 60 + 3 * WINDOWS * window_s
        try:
            process = subprocess.Popen(
                command,
                env=self._variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
            )
        except OSError as error:
            raise InputError(f"{self._program} does not run: {error.strerror}; `make setup` makes it anew") from None
        with process:
            try:
                output, errors = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                raise CheckFailed(f"perf_analyzer on {where}: not done after {timeout_s:.0f} s") from None
            finally:
                # interrupted: it is gone before its files are removed
                process.kill()
                process.wait()
        return process.returncode, output, errors


def _found(pattern: str, text: str) -> list[str]:
    found = re.findall(pattern, text, re.MULTILINE)
    if not found:
        raise CheckFailed(f"perf_analyzer said {text[-200:]!r}: {pattern!r} was expected in it")
    return found
