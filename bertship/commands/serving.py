"""From an export to a repository, a server, answers and load."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bertship.commands.exporting import run_export
from bertship.commands.options import (
    REPOSITORY,
    RUNS,
    URL,
    BringOption,
    ChoiceOption,
    ContextOption,
    DataOption,
    InitOption,
    NameOption,
    ParameterOption,
    PrecisionOption,
    PresetOption,
    QuestionOption,
    RepositoryOption,
    RunsOption,
    TaskOption,
    TextOption,
    TextPairOption,
    UrlOption,
    find_task,
    get_task,
    need,
    parse_columns,
    parse_parameters,
    server_url,
)
from bertship.console import answer_lines, load, read_samples, report, show
from bertship.errors import ClientError, InputError, InvalidRequest, ServerUnavailable, TaskUnavailable
from bertship.shell import shown

if TYPE_CHECKING:
    from bertship.client import Client

LOCAL = "127.0.0.1"


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
    definition = find_task(task, runs)
    out = runs / "export" / definition.name
    if bring and not out.is_dir():
        run_export(task, "auto", init, preset, data, runs, name, False, True)
    need(out, f"bertship export --task {task}")
    folders = load("serving.repository:render")(out, target, None if precision == "auto" else precision)
    report(load("serving.repository_lint:describe")(definition.name))
    show({"models": [str(folder) for folder in folders]}, [str(folder) for folder in folders])


def serve(
    target: RepositoryOption = REPOSITORY,
    runs: RunsOption = RUNS,
    http_port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    grpc_port: Annotated[int, typer.Option(min=0, max=65535)] = 8001,
    metrics_port: Annotated[int, typer.Option(min=0, max=65535)] = 8002,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 opens it to other machines.")] = LOCAL,
    trace: Annotated[bool, typer.Option("--trace", help="Time stamps of each step, in RUNS/serve/trace.json.")] = False,
    trace_rate: Annotated[int, typer.Option(min=1, help="With --trace: of one in so many requests.")] = 1,
    detach: Annotated[bool, typer.Option("--detach", help="Leave it running; `bertship stop` stops it.")] = False,
) -> None:
    """Start Triton on the repository and keep it answering.

    Says where, once every model is ready and warm; starts again what crashes; stops in order on SIGTERM and Ctrl-C.
    With --detach all of that goes on in the background.
    """
    ready = load("serving.repository:ready_models")(target)
    options = {"models": ready, "host": host, "http_port": http_port, "grpc_port": grpc_port}
    options |= {"metrics_port": metrics_port, "triton": load("serving.environment:prepare")(report)}
    if trace:
        options |= {"trace_path": runs / "serve" / "trace.json", "trace_rate": trace_rate}

    def say_ready(state: dict[str, Any]) -> None:
        lines = [f"ready: {', '.join(_tasks(ready))} at {state['http_url']} and {state['grpc_url']} (gRPC)"]
        lines += [f"metrics at {state['metrics_url']}, log in {state['events']}"]
        show(state, lines)
        sys.stdout.flush()

    if detach:
        say_ready(load("serving.detached:start_detached")(target, runs / "serve", **options))
        return
    with stopped_in_order():
        load("serving.keeper:keep")(target, runs / "serve", ready=say_ready, say=report, **options)


@contextlib.contextmanager
def stopped_in_order() -> Iterator[None]:
    """SIGTERM and Ctrl-C end the block in order, and that is no failure."""

    class Stopped(BaseException):
        pass

    def stop(*_: object) -> None:
        raise Stopped

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except (Stopped, KeyboardInterrupt):
        pass
    finally:
        signal.signal(signal.SIGTERM, before)


def health(
    url: Annotated[
        str, typer.Option("--url", help=f"http://HOST:PORT; the server that `serve` runs, else {URL}.")
    ] = "",
    task: Annotated[list[str] | None, typer.Option("--task", "-t", help="A task; without it, all of them.")] = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="For each task's answer.")] = 5.0,
    runs: RunsOption = RUNS,
) -> None:
    """Whether a server answers: one inference a task.

    A probe for whoever watches a server: exit 0 where every task answers, else 1.
    """
    from bertship.health import NO_ANSWER, check, lines

    url = server_url(url, runs)
    try:
        results = check(url, task or (), timeout_s)
    except ValueError as error:
        raise InputError(str(error)) from None
    healthy = all(result.ok for result in results)
    tasks = {r.task: {"version": r.version, "problem": r.problem, "seconds": r.seconds} for r in results}
    show({"healthy": healthy, "url": url, "tasks": tasks}, lines(results))
    if not healthy:
        problems = "; ".join(f"{result.task} {result.problem}".strip() for result in results if not result.ok)
        away = all(result.problem.startswith(NO_ANSWER) for result in results)
        hint = "; start one with `make serve`, or name another with --url" if away else ""
        raise ServerUnavailable(f"{url} is not healthy: {problems}{hint}")


def deploy(
    export: Annotated[Path | None, typer.Argument(help="A directory that `bertship export` wrote.")] = None,
    task: Annotated[
        str, typer.Option("--task", "-t", help="With --rollback: the task, where several are served.")
    ] = "",
    rollback: Annotated[bool, typer.Option("--rollback", help="Serve the version before again.")] = False,
    precision: PrecisionOption = "auto",
    target: Annotated[Path | None, typer.Option("--repository", help="The server's own, where not given.")] = None,
    runs: RunsOption = RUNS,
    url: Annotated[str, typer.Option("--url", help="A server that `serve` of these runs did not start.")] = "",
    key_file: Annotated[Path | None, typer.Option("--key-file", help="With --url: the file with its key.")] = None,
) -> None:
    """A new version of a task into the running server, while it answers.

    The version is put beside the one that serves, loaded, compared with the export's own answers, and only then
    switched to; one that fails is taken away again. The version before is kept: --rollback goes back to it. Older ones
    are removed, and named.
    """
    state = None if url else load("serving.keeper:running")(runs / "serve")
    if not url and state is None:
        raise InputError(
            f"no server of {runs / 'serve'} runs: start one with `make serve` (`bertship serve --detach`), or name one "
            "with --url"
        )
    if url and (key_file is None or target is None):
        raise InputError("--url needs --key-file and --repository: the server's key and the models it reads")
    state = state or {"http_url": url, "key": key_file, "repository": target}
    key = load("serving.control:read_key")(Path(state["key"]))
    server = load("serving.control:Control")(state["http_url"], key)
    log = load("serving.events:EventLog")(runs / "serve" / "serve.jsonl", report)
    rollout = load("serving.rollout:Rollout")(target or Path(state["repository"]), server, log)
    if rollback:
        result = rollout.rollback(
            get_task(task).name if task.endswith(".toml") else task or _only_task(state["http_url"])
        )
    elif export is None:
        raise InputError("what is to be deployed? give the directory that `bertship export` wrote, or --rollback")
    else:
        need(export, "bertship export")
        result = rollout.deploy(export, None if precision == "auto" else precision)
    show(result, _deployed(result))


def _only_task(url: str) -> str:
    """The task that a server has. Raises InputError where there are several."""
    from bertship.client import Client

    with Client(url) as client:
        served = client.tasks()
    if len(served) != 1:
        raise InputError(f"which task? --task is needed: {', '.join(served) or 'none'} served at {url}")
    return served[0]


def _deployed(result: dict[str, Any]) -> list[str]:
    """What a deployment did, for people."""
    measured = load("serving.rollout:measured")
    task, version, before = (result[name] for name in ("task", "version", "previous"))
    if version == before:
        return [f"{task}: this export serves already, as version {version}; nothing was changed"]
    kept = f"; version {before} is kept" if before else ""
    if before and int(before) < int(version):  # one goes back to an earlier version, never on to a later one
        kept += f", `bertship deploy --rollback --task {task}` goes back to it"
    elif before:
        kept += ", `bertship deploy` of its export goes on to it"
    said = [f"{task}: version {version} serves{kept}"]
    said.append(f"  version {version}: {measured(result['facts'])}")
    if before:
        said.append(f"  version {before}: {measured(result['facts_before'])}")
    if warning := load("serving.rollout:warning_of")(result["facts"], result["facts_before"]):
        said.append(f"  WARNING of version {version}: {warning}")
    if result["removed"]:
        said.append(f"  removed: version {', '.join(result['removed'])}")
    return said


def stop(runs: RunsOption = RUNS) -> None:
    """Stop what `serve` started: running requests are answered first."""
    stopped = load("serving.detached:stop_detached")(runs / "serve")
    show({"stopped": stopped}, ["stopped" if stopped else "no server was running"])


def ask(
    task: TaskOption = "sst2",
    text: TextOption = None,
    text_pair: TextPairOption = None,
    question: QuestionOption = None,
    context: ContextOption = None,
    parameter: ParameterOption = None,
    choice: ChoiceOption = None,
    url: UrlOption = "",
    timeout_s: Annotated[float, typer.Option(min=0.1, help="For the whole answer.")] = 30.0,
    runs: RunsOption = RUNS,
) -> None:
    """Ask a served task.

    With --text, with --text and --text-pair, with --text and a --choice for each choice, or with --question and
    --context. Probabilities are shown by label; with --json they are in the order of "labels".
    """
    from bertship.client import Client

    columns = parse_columns(text, text_pair, question, context, choice)
    parameters = parse_parameters(parameter)
    name = get_task(task).name if task.endswith(".toml") else task
    with Client(server_url(url, runs), timeout_s) as client:
        try:
            answers = client.ask(name, parameters, **columns)
        except TaskUnavailable as error:
            raise _with_served(error, client) from None
        except InvalidRequest as error:
            raise _with_inputs(error, client, name, columns) from None
        labels: tuple[str, ...] = ()
        if any("PROBABILITIES" in answer for answer in answers):
            with contextlib.suppress(ClientError):  # names are no part of the answer
                labels = client.labels(name)
    show({"answers": answers, "labels": list(labels)}, answer_lines(answers, labels))


def _with_inputs(error: InvalidRequest, client: "Client", task: str, columns: dict[str, Any]) -> InvalidRequest:
    """The error with what the task is asked with, where that is not what was given."""
    try:
        wanted = client.inputs(task)
    except ClientError:
        return error
    if set(wanted) == columns.keys():
        return error
    return InvalidRequest(f"{error.reason}; {task} is asked with {', '.join(wanted)}")


def _with_served(error: TaskUnavailable, client: "Client") -> TaskUnavailable:
    """The error with what can be asked instead."""
    try:
        served = client.tasks()
    except ClientError:
        return error
    return TaskUnavailable(f"{error}; served there: {', '.join(served) or 'nothing'}")


def bench(
    task: TaskOption = "sst2",
    concurrency: Annotated[str, typer.Option(help="Numbers of clients, parted by commas.")] = "1,2,4,8,16,32",
    request_rate: Annotated[
        str, typer.Option(help="Requests a second, parted by commas: open loop, Poisson arrivals.")
    ] = "",
    protocol: Annotated[str, typer.Option(help="http, grpc, or both parted by a comma.")] = "http,grpc",
    seconds: Annotated[float, typer.Option(min=1, help="Length of each measurement.")] = 5.0,
    target: RepositoryOption = REPOSITORY,
    runs: RunsOption = RUNS,
    bring: BringOption = False,
) -> None:
    """Load a served task with perf_analyzer.

    Real texts at each number of clients and each request rate: latency percentiles, throughput, the steps' shares,
    batch sizes, padding, memory; JSON, CSV and a plot in runs/bench/TASK. Starts a server for the time of the
    measurement where `serve --detach` runs none.
    """
    definition = find_task(task, runs, target)
    export = runs / "export" / definition.name
    if bring and not any(target.glob(f"{definition.name}_encode/[0-9]*/model.onnx")):
        repository(task, "auto", "", "tiny", None, runs, "default", target, True)
    need(export, f"bertship export --task {task}")
    counts = [int(part) for part in concurrency.split(",") if part.strip().isdigit() and int(part)]
    protocols = [part.strip() for part in protocol.split(",")]
    try:
        rates = [float(part) for part in request_rate.split(",") if part.strip()]
    except ValueError:
        raise InputError(f"--request-rate {request_rate!r}: numbers such as 20,50 are needed") from None
    if not (counts or rates) or not set(protocols) <= {"http", "grpc"}:
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
            state = {name: getattr(server, name) for name in ("http_url", "grpc_url", "metrics_url", "pid")}
        samples = read_samples(export)
        pipeline = load("serving.check:served_pipeline")(target, definition.name)
        compared = load("serving.check:check_answers")(pipeline, state["http_url"], samples)
        version = load("serving.repository:served_version")(target, definition.name)
        report(f"{compared} answers of version {version} compared with `predict` on its files: equal to the last bit")
        result = load("serving.bench:bench")(
            definition.name,
            samples,
            http_url=state["http_url"],
            grpc_url=state["grpc_url"],
            triton=triton,
            out=runs / "bench" / definition.name,
            concurrencies=counts,
            request_rates=rates,
            protocols=protocols,
            seconds=seconds,
            report=report,
            precision=load("serving.repository:served_precision")(target, definition.name),
            served_version=version,
            metrics_url=state["metrics_url"],
            server_pid=state["pid"],
        )
    out = runs / "bench" / definition.name
    show(result, [*load("serving.bench:lines")(result), f"report: {shown(out / 'report.html')}"])


def _tasks(models: list[str]) -> list[str]:
    return [name for name in models if f"{name}_encode" in models]
