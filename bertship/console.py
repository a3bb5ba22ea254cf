"""How a command speaks: results on stdout, progress on stderr, every error one line; and how it finds its stage."""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

from bertship.errors import BertshipError, InputError
from bertship.shell import typed_within

_options: dict[str, bool] = {"json": False}
_COARSE = ("epochs_run", "perplexity", "tokens_per_s")  # of which ten thousandths say nothing


def load(where: str) -> Any:
    """A stage's function by `module:name`: how the core runs stages that it must not import."""
    module, _, name = where.partition(":")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        missing = (error.name or module).partition(".")[0]
        if missing in ("train", "export", "serving"):
            raise InputError("this command runs from a checkout: clone the project and `pip install -e .`") from None
        raise InputError(f"this command needs {missing}, which is not installed; run `make` in a checkout") from None


def report(line: str) -> None:
    """One line of progress on stderr."""
    Console(stderr=True).print(line, markup=False, highlight=False, soft_wrap=True)


def show(result: dict[str, Any], lines: list[str]) -> None:
    """The command's result on stdout: for people, or as one JSON object."""
    if _options["json"]:
        sys.stdout.write(json.dumps(result, ensure_ascii=False, default=str) + "\n")
    else:
        sys.stdout.write("".join(f"{line}\n" for line in lines))


def read_samples(export: Path) -> list[dict[str, Any]]:
    """An export's real texts with PyTorch's answers: {"columns": {...}, "answer": {...}} each."""
    lines = (export / "samples.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def metric_lines(metrics: dict[str, Any], indent: str = "  ", notes: Mapping[str, str] | None = None) -> list[str]:
    """Metrics by name, those of tables indented; a count or a duration in its own unit, a note behind its value."""
    lines = []
    for name, value in metrics.items():
        note = f"  ({notes[name]})" if notes and notes.get(name) else ""
        if isinstance(value, dict):
            lines += [f"{indent}{name}", *metric_lines(value, indent + "  ")]
        elif name.endswith("_seconds"):
            lines.append(f"{indent}{name.removesuffix('_seconds'):<20} {value:,.1f} s{note}")
        elif isinstance(value, float):
            lines.append(f"{indent}{name:<20} {value:{'.1f' if name in _COARSE else '.4f'}}{note}")
        else:
            shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value
            lines.append(f"{indent}{name:<20} {shown}{note}")
    return lines


def answer_lines(answers: list[dict[str, Any]], labels: Sequence[str] = ()) -> list[str]:
    """Answers for people, a line of JSON each; PROBABILITIES by the names of the `labels`, in whose order they are.

    Numbers have six digits, as many as FP32 bears.
    """
    named = []
    for answer in answers:
        shares = answer.get("PROBABILITIES", [])
        known = len(shares) == len(labels) > 0
        named.append(answer | {"PROBABILITIES": dict(zip(labels, shares, strict=True))} if known else answer)
    return [json.dumps(_short(answer), ensure_ascii=False) for answer in named]


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _short(item) for name, item in value.items()}
    return [_short(item) for item in value] if isinstance(value, list) else value


def difference(value: float | None) -> str:
    """A difference of the gate's, for people; None is one that is not finite."""
    return "nan" if value is None else f"{value:.1e}"


_LEGEND = (
    "  mode: rows alone, or in batches padded to so many tokens; torch half: PyTorch itself in half precision",
    "  largest, mean: differences of a logit from PyTorch's FP32, as shares of its largest one; same: equal decisions",
    "  metric: on these texts, in brackets the change from PyTorch's; what FAILED is not published",
)


def parity_lines(manifest: dict[str, Any]) -> list[str]:
    """The gate's comparisons as a table of plain text."""
    lines = [
        f"  {'precision':<10} {'size':>9}  {'rows':>5} {'mode':<14} {'largest':>8} {'mean':>8} {'same':>8}  metric"
    ]
    for result in manifest["metrics"]["parity"]:
        name = result["precision"]
        plan = (manifest.get("plans") or {}).get(name, {}) if result["engine"] == "tensorrt" else {}
        size = manifest["files"][plan.get("file") or manifest["graphs"][name]]["bytes"] / 1e6
        metric = "no labels"
        if result["artifact_metric"] is not None:
            change = result["artifact_metric"] - result["reference_metric"]
            metric = f"{result['metric']} {result['artifact_metric']:.4f} ({change:+.4f})"
        largest, mean = difference(result["max_difference"]), difference(result["mean_difference"])
        lines.append(
            f"  {name:<10} {size:>6.1f} MB  {result['rows']:>5} {result['mode']:<14} {largest:>8} "
            f"{mean:>8} {result['agreement']:>8.2%}  {metric}"
            f"{'' if result['passed'] else '  FAILED'}"
        )
    return [*lines, *_LEGEND]


_TERMINATED = 128 + signal.SIGTERM


def _terminate(*_: object) -> None:
    """SIGTERM: everything is cleaned up as after Ctrl-C."""
    raise SystemExit(_TERMINATED)


def run(app: Callable[..., Any]) -> None:
    """Run a typer application on `sys.argv`; every error becomes one line, with a traceback only under --debug.

    Exits with 0 done, 1 a check failed or a server could not be asked, 2 wrong usage or input, 130 interrupted,
    143 ended by SIGTERM.
    """
    # libgomp's threads spin while they wait: beside any other load that slows training many times over
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    signal.signal(signal.SIGTERM, _terminate)
    debug, _options["json"] = "--debug" in sys.argv, "--json" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument not in ("--debug", "--json")]
    try:
        if app(arguments, prog_name="bertship", standalone_mode=False) == 130:  # how typer returns a Ctrl-C
            raise KeyboardInterrupt
        sys.stdout.flush()
    except KeyboardInterrupt:
        # where Ctrl-C fell into code made from a string, as an import of dataclasses is, CPython remembers that and
        # ends `python -m` by the signal instead of our exit code, until other such code has run
        exec("")
        _fail("interrupted; nothing is left half written", 130, debug)
    except SystemExit as end:  # a training raises it too, once it has saved where it was
        if end.code != _TERMINATED:
            raise
        _fail("ended by SIGTERM; nothing is left half written", _TERMINATED, debug)
    except BertshipError as error:
        _fail(str(error), error.exit_code, debug)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has left, as `head` does
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        _fail(f"{error.strerror or error}{place}", 2, debug)
    except Exception as error:
        usage = getattr(error, "format_message", None)  # click's own: an unknown option, a missing value
        if type(error).__name__ == "NoArgsIsHelpError":
            sys.stdout.write(f"{usage()}\n" if usage else "")
            return
        if usage:
            hint = f"`{_command(error)} --help` lists what there is"
            _fail(f"{usage().rstrip('.')}{_seen(error, arguments)}; {hint}", 2, debug)
        _fail(f"unexpected {type(error).__name__}: {error}; run again with --debug for the traceback", 1, debug)


def _command(error: Exception) -> str:
    """The command that an error of usage belongs to."""
    return getattr(getattr(error, "ctx", None), "command_path", "") or "bertship"


def _seen(error: Exception, arguments: list[str]) -> str:
    """The value that an option was given, for an error that names the option alone."""
    for name in getattr(getattr(error, "param", None), "opts", []):
        if name in arguments[:-1]:
            return f" (seen: {arguments[arguments.index(name) + 1]!r})"
    return ""


def _fail(message: str, code: int, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    report(f"error: {typed_within(' '.join(message.split()))}")
    sys.exit(code)
