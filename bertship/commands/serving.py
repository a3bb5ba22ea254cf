"""From an export to a repository, a server, answers and load."""

import contextlib
import json
import sys
from typing import Annotated

import typer

from bertship.commands.exporting import run_export
from bertship.commands.options import (
    REPOSITORY,
    RUNS,
    URL,
    BringOption,
    DataOption,
    InitOption,
    NameOption,
    PrecisionOption,
    PresetOption,
    RepositoryOption,
    RunsOption,
    TaskOption,
    TextOption,
    UrlOption,
    get_task,
    need,
    parse_columns,
)
from bertship.console import load, read_samples, report, show
from bertship.errors import InputError, ServerUnavailable


def repository(
    task: TaskOption = "sst2",
    precision: PrecisionOption = "auto",
    init: InitOption = "",
    preset: PresetOption = "tiny",
    data: DataOption = None,
    runs: RunsOption = RUNS,
    name: NameOption = "default",
    target: RepositoryOption = REPOSITORY,
    bring: BringOption = False,
) -> None:
    """An export into the Triton repository.

    --precision auto serves what is fastest on this machine.
    """
    out = runs / "export" / get_task(task).name
    if bring and not out.is_dir():
        run_export(task, "auto", init, preset, data, runs, name, False, True)
    need(out, f"bertship export --task {task}")
    folders = load("serving.repository:render")(out, target, None if precision == "auto" else precision)
    show({"models": [str(folder) for folder in folders]}, [str(folder) for folder in folders])


def serve(
    target: RepositoryOption = REPOSITORY,
    runs: RunsOption = RUNS,
    http_port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    grpc_port: Annotated[int, typer.Option(min=0, max=65535)] = 8001,
    metrics_port: Annotated[int, typer.Option(min=0, max=65535)] = 8002,
    detach: Annotated[bool, typer.Option("--detach", help="Leave it running; `bertship stop` stops it.")] = False,
) -> None:
    """Start Triton on the repository.

    Returns, or with --detach leaves the server running, once every model is ready.
    """
    ready = load("serving.repository:ready_models")(target)
    ports = {"http_port": http_port, "grpc_port": grpc_port, "metrics_port": metrics_port}
    triton = load("serving.environment:prepare")(report)
    if detach:
        state = load("serving.detached:start_detached")(target, runs / "serve", models=ready, triton=triton, **ports)
        show(state, [f"ready: {', '.join(_tasks(ready))} at {state['http_url']} and {state['grpc_url']} (gRPC)"])
        return
    with load("serving.server:TritonServer")(triton) as server:
        server.start(target, models=ready, log_path=runs / "serve" / "triton.log", **ports)
        show(
            {"http_url": server.http_url, "grpc_url": server.grpc_url, "models": ready},
            [f"ready: {', '.join(_tasks(ready))} at {server.http_url} and {server.grpc_url} (gRPC); Ctrl-C stops it"],
        )
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):  # how a server in the foreground is stopped
            server.wait()
            raise ServerUnavailable(f"the server has ended by itself; its log is {runs / 'serve' / 'triton.log'}")


def stop(runs: RunsOption = RUNS) -> None:
    """Stop what `serve --detach` started."""
    stopped = load("serving.detached:stop_detached")(runs / "serve")
    show({"stopped": stopped}, ["stopped" if stopped else "no server was running"])


def ask(
    task: TaskOption = "sst2",
    text: TextOption = None,
    text_pair: TextOption = None,
    question: TextOption = None,
    context: TextOption = None,
    choice: TextOption = None,
    url: UrlOption = URL,
    timeout_s: Annotated[float, typer.Option(min=0.1)] = 30.0,
) -> None:
    """Ask a served task.

    With --text, with --text and --text-pair, with --text and a --choice for each choice, or with --question and
    --context.
    """
    from bertship.client import Client

    columns = parse_columns(text, text_pair, question, context, choice)
    with Client(url, timeout_s) as client:
        answers = client.ask(get_task(task).name if task.endswith(".toml") else task, None, **columns)
    show({"answers": answers}, [json.dumps(answer, ensure_ascii=False) for answer in answers])


def bench(
    task: TaskOption = "sst2",
    concurrency: Annotated[str, typer.Option(help="Numbers of clients, parted by commas.")] = "1,2,4,8,16,32",
    protocol: Annotated[str, typer.Option(help="http, grpc, or both parted by a comma.")] = "http,grpc",
    seconds: Annotated[float, typer.Option(min=1, help="Length of each measurement.")] = 5.0,
    target: RepositoryOption = REPOSITORY,
    runs: RunsOption = RUNS,
    bring: BringOption = False,
) -> None:
    """Load a served task with perf_analyzer.

    Real texts at each number of clients: latency percentiles, throughput, batch sizes; runs/bench/TASK. Starts a
    server for the time of the measurement where `serve --detach` runs none.
    """
    definition = get_task(task)
    export = runs / "export" / definition.name
    if bring and not (target / f"{definition.name}_encode" / "1" / "model.onnx").is_file():
        repository(task, "auto", "", "tiny", None, runs, "default", target, True)
    need(export, f"bertship export --task {task}")
    counts = [int(part) for part in concurrency.split(",") if part.strip().isdigit() and int(part)]
    protocols = [part.strip() for part in protocol.split(",")]
    if not counts or not set(protocols) <= {"http", "grpc"}:
        raise InputError(
            f"--concurrency {concurrency!r} --protocol {protocol!r}: such as 1,8,32 and http,grpc are needed"
        )
    triton = load("serving.environment:prepare")(report)
    with contextlib.ExitStack() as stack:
        state = load("serving.detached:running")(runs / "serve")
        if state is None:
            ready = load("serving.repository:ready_models")(target)
            server = stack.enter_context(load("serving.server:TritonServer")(triton))
            report("no server is running; starting one for this measurement")
            free = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
            server.start(target, models=ready, log_path=runs / "bench" / "triton.log", **free)
            state = {"http_url": server.http_url, "grpc_url": server.grpc_url}
        samples = read_samples(export)
        pipeline = load("serving.check:served_pipeline")(target, definition.name)
        compared = load("serving.check:check_answers")(pipeline, state["http_url"], samples)
        report(f"{compared} answers compared with `predict`: equal to the last bit")
        result = load("serving.bench:bench")(
            definition.name,
            samples,
            http_url=state["http_url"],
            grpc_url=state["grpc_url"],
            triton=triton,
            out=runs / "bench" / definition.name,
            concurrencies=counts,
            protocols=protocols,
            seconds=seconds,
            report=report,
        )
    show(result, load("serving.bench:lines")(result))


def _tasks(models: list[str]) -> list[str]:
    return [name for name in models if f"{name}_encode" in models]
