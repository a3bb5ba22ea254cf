"""What Triton's log says about a start that fails."""

import contextlib
import json
import re
from collections.abc import Iterator

# Triton's texts for what makes a start fail, in 2.51; the reason ends where the Python traceback begins
_FAILURES = [
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"failed to load '(?P<model>[^']+)' version \S+: (?P<reason>.+)",
        r"failed to (?:load|poll) model '(?P<model>[^']+)': (?P<reason>.+)",
        r"Poll failed for model directory '(?P<model>[^']+)': (?P<reason>.+)",
        r"Failed to preinitialize Python stub: (?P<reason>.+)",
        r"(?P<reason>ensemble \S+ contains models that are not available.+)",
        r"(?P<reason>failed to start \S+ service: .+)",
    )
]
# said in every start without a GPU
_NOISE = ("CudaDriverHelper has not been initialized", "unable to create stream")


def _messages(log: str) -> Iterator[tuple[str, str]]:
    """Level and text of Triton's log lines: `E1129 18:28:19.3 4827 file.cc:642] "text, escaped as in JSON"`."""
    for line in log.splitlines():
        if found := re.match(r"([IWE])\d{4} \S+ +\d+ \S+\] *(.+)", line):
            level, text = found.groups()
            with contextlib.suppress(ValueError):
                text = str(json.loads(text))
            yield level, text.strip()


def failure(log: str) -> str:
    """The first reason in the log why the start fails, in one line; empty where there is none."""
    for _, text in _messages(log):
        for pattern in _FAILURES:
            if found := pattern.search(text):
                model = found.groupdict().get("model")
                reason = _one_line(found["reason"])
                parser = re.search(r"Error parsing text-format .+", log)
                if parser and "failed to read text proto" in reason:
                    reason = f"{reason}: {parser[0].rstrip('.')}"
                return f"model '{model}': {reason}" if model else reason
    return ""


def without_texts(text: str) -> str:
    """What went wrong in a model without the exception's own words, which may hold what was asked."""
    return re.sub(
        r"(Failed to process the request\(s\) for model '[^']*', message: \w+).*", r"\1", text, flags=re.DOTALL
    )


def complaints(log: str) -> Iterator[tuple[str, str]]:
    """The log's warnings and errors, in one line each: level ("warning", "error") and text."""
    for level, text in _messages(log):
        if level in "WE" and not any(noise in text for noise in _NOISE):
            yield {"W": "warning", "E": "error"}[level], without_texts(_one_line(text))


def listens(log: str) -> bool:
    """Whether the server has opened its HTTP port, which it does after the gRPC one.

    An answer on the port alone may be another server's that was faster.
    """
    return any(text.startswith("Started HTTPService") for _, text in _messages(log))


def last_error(log: str) -> str:
    """The most telling line of a server that ended; empty where it said nothing."""
    before, usage, after = log.partition("Usage: tritonserver [options]")
    if usage:
        # an unknown flag is named before the usage, a wrong value after it
        return (before.strip() or after.strip()).splitlines()[-1]
    errors = [text for level, text in _messages(log) if level == "E" and not any(noise in text for noise in _NOISE)]
    # missing libraries are told without a level, before there is a logger, and so is the last word
    plain = [line for line in log.splitlines() if "error" in line.lower() and line[:1] not in "|+EIW"]
    return _one_line((plain or errors or [""])[-1])


def _one_line(text: str) -> str:
    """What was raised, without the traceback that the Python backend adds and the status code that Triton prefixes."""
    raised = re.split(r"\n+At:\n", text)[0]
    return re.sub(r"^(Internal|Invalid argument|Unavailable|Not found): ", "", " ".join(raised.split()))


def loading(log: str) -> list[str]:
    """Models whose loading has begun and not ended."""
    texts = [text for _, text in _messages(log)]
    begun = [found[1] for text in texts if (found := re.match(r"loading: (.+):\d+$", text))]
    done = {found[1] for text in texts if (found := re.match(r"successfully loaded '(.+)'", text))}
    return [name for name in begun if name not in done]
