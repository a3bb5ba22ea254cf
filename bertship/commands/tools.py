"""Beside the line: a page to try what is served, and a look at the machine."""

import contextlib
import os
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from bertship.commands.options import REPOSITORY, RUNS, RepositoryOption, RunsOption, server_url
from bertship.console import load, report, show
from bertship.errors import CheckFailed


def playground(
    url: Annotated[
        str, typer.Option("--url", help="The server's http://HOST:PORT; the one of `serve --detach` if none.")
    ] = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The page's own port; 0 takes a free one.")] = 8003,
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0 shows the page to the whole network.")
    ] = "127.0.0.1",
    target: RepositoryOption = REPOSITORY,
    runs: RunsOption = RUNS,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open it, where there is a screen.")] = True,
    bring: Annotated[
        bool, typer.Option("--bring", help="Start a server for as long as the page is there, where none runs.")
    ] = False,
) -> None:
    """A web page on the running server.

    Every served task with its answers, their time, and the same request as curl and Python; Ctrl-C ends it.
    """
    with contextlib.ExitStack() as stack:
        if not url and (state := load("serving.detached:running")(runs / "serve")):
            url, target = state["http_url"], Path(state["repository"])
        elif not url and bring:
            ready = load("serving.repository:ready_models")(target)
            triton = load("serving.environment:prepare")(report)
            server = stack.enter_context(load("serving.server:TritonServer")(triton))
            report("no server is running; starting one for as long as the page is there")
            free = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
            server.start(target, models=ready, log_path=runs / "playground" / "triton.log", **free)
            url = server.http_url
        served = load("serving.playground:Served")(server_url(url, runs), target, runs)
        tasks = [task["name"] for task in served.tasks()]
        page = stack.enter_context(load("serving.playground:Playground")(served, port, host))
        show(
            {"url": page.url, "server": served.url, "tasks": tasks},
            [f"{page.url} shows {', '.join(tasks) or 'no task'} of {served.url}; Ctrl-C ends it"],
        )
        sys.stdout.flush()
        # elsewhere a browser for terminals would take the screen
        if browser and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
            webbrowser.open(page.url)
        with contextlib.suppress(KeyboardInterrupt):  # how it is ended
            page.serve()


def compare(
    directories: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Directories of runs of one kind, the first as the baseline.")
    ],
    runs: RunsOption = RUNS,
) -> None:
    """Runs side by side.

    Pre-training, fine-tuning, exports, parity runs and measurements, told apart by what their directories hold: the
    settings that differ, metrics with their differences to the first run's, and runs/compare/KIND/report.html with
    the curves over each other.
    """
    comparison = load("bertship.compare:compare")(directories)
    if any(run.curves for run in comparison):
        load("matplotlib.figure:Figure")
    out = runs / "compare" / comparison[0].kind / "report.html"
    load("bertship.compare:page")(comparison).write(out)
    shown = {**load("bertship.compare:as_dict")(comparison), "report": str(out)}
    show(shown, [*load("bertship.compare:lines")(comparison), "", str(out)])


def doctor(runs: RunsOption = RUNS) -> None:
    """What this machine has of what the line needs.

    What was found, what it enables, and what to type to get the rest; exits with 1 where something is missing.
    """
    from bertship.doctor import examine, lines, ready, result

    checks = examine(runs)
    show(result(checks), lines(checks))
    if not ready(checks):
        missing = ", ".join(check.name for check in checks if check.status == "missing")
        raise CheckFailed(f"the line cannot run here: {missing} missing; what to type is said above")
