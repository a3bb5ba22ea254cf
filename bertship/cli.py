"""The command line. Results go to stdout, progress to stderr; a stage is imported when its command runs.

Exit codes: 0 done, 1 a check failed or a server could not be asked, 2 wrong usage or input, 130 interrupted.
"""

import contextlib
import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from bertship.console import load, metric_lines, parity_lines, read_samples, report, run, show
from bertship.errors import InputError, ServerUnavailable

RUNS = Path("runs")
REPOSITORY = Path("model_repository")
URL = "http://127.0.0.1:8000"

app = typer.Typer(
    name="bertship",
    help="Text in, a measured BERT service out: pre-train, fine-tune, export, serve and ask.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)


def _plain_name(name: str) -> str:
    """A run's name is a folder's name: anything else could lead out of the runs, or name the folder of all of them."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise InputError(f"run name {name!r}: letters, digits, '.', '_' and '-' are needed, a letter or digit first")
    return name


TaskOption = Annotated[str, typer.Option("--task", "-t", help="A built-in task's name, or a .toml file with yours.")]
RunsOption = Annotated[Path, typer.Option("--runs", help="The folder that holds the runs.")]
NameOption = Annotated[
    str,
    typer.Option("--name", help="The run's name: several runs can stand side by side.", callback=_plain_name),
]
DataOption = Annotated[str | None, typer.Option("--data", help="A folder with the task's official files.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the configuration.")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Run again even when the result is up to date.")]
BringOption = Annotated[bool, typer.Option("--bring", help="Make what this command needs first, where it is missing.")]
InitOption = Annotated[
    str, typer.Option("--init", help="The warm start: `minilm`, a model directory, a run, or a hub name.")
]
PresetOption = Annotated[str, typer.Option("--preset", help="A size (tiny, mini, ..., large), or a .toml file.")]
RepositoryOption = Annotated[Path, typer.Option("--repository", help="The Triton model repository.")]
UrlOption = Annotated[str, typer.Option("--url", help="http://HOST:PORT or grpc://HOST:PORT.")]
PrecisionOption = Annotated[str, typer.Option("--precision", help="auto, or of fp32, fp16, int8.")]
TextOption = Annotated[list[str] | None, typer.Option(help="A text; give the option again for several.")]


def _version(wanted: bool) -> None:
    if wanted:
        from bertship import __version__

        sys.stdout.write(f"bertship {__version__}\n")
        raise typer.Exit


@app.callback()
def _global(
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print a traceback with an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Text in, a measured BERT service out: pre-train, fine-tune, export, serve and ask.

    --json and --debug may also stand after the command.
    """


@app.command()
def demo(
    runs: RunsOption = RUNS,
    force: ForceOption = False,
) -> None:
    """The whole line on real text, in minutes.

    Corpus, pre-training, fine-tuning, export, the real Triton server, questions over HTTP and gRPC.
    """
    from bertship.demo import run_demo, summary_lines

    result = run_demo(runs / "demo", force)
    show(result, summary_lines(result))


@app.command()
def corpus(
    sources: Annotated[list[str] | None, typer.Argument(help="Document files; a Wikipedia sample if none.")] = None,
    runs: RunsOption = RUNS,
    name: NameOption = "default",
    settings: SetOption = None,
    force: ForceOption = False,
) -> None:
    """Documents to tokens: runs/corpus/NAME.

    Sentences, a WordPiece vocabulary, and ids in memory-mapped files.
    """
    out = runs / "corpus" / name
    manifest = load("train.stages:make_corpus")(sources or [], out, _settings(settings), report, force)
    show(manifest, [str(out), *metric_lines(manifest["metrics"])])


@app.command()
def pretrain(
    preset: PresetOption = "tiny",
    corpus_name: Annotated[
        str, typer.Option("--corpus", help="The corpus run's name.", callback=_plain_name)
    ] = "default",
    runs: RunsOption = RUNS,
    name: NameOption = "default",
    settings: SetOption = None,
    force: ForceOption = False,
    bring: BringOption = False,
) -> None:
    """A BERT from scratch: runs/pretrain/NAME.

    Masked LM + next sentence prediction on a corpus, with a held-out evaluation before and after.
    """
    source = runs / "corpus" / corpus_name
    if bring and not source.is_dir():
        load("train.stages:make_corpus")([], source, {}, report)
    out = runs / "pretrain" / name
    manifest = load("train.stages:make_pretraining")(source, out, preset, _settings(settings), report, force)
    show(manifest, [str(out), *metric_lines(manifest["metrics"])])


@app.command()
def finetune(
    task: TaskOption = "sst2",
    init: InitOption = "",
    preset: PresetOption = "tiny",
    data: DataOption = None,
    runs: RunsOption = RUNS,
    name: NameOption = "default",
    settings: SetOption = None,
    force: ForceOption = False,
) -> None:
    """A task on a warm start: runs/finetune/TASK/NAME."""
    out, manifest = _finetune(task, init, preset, data, runs, name, _settings(settings), force)
    show(manifest, [str(out), *metric_lines(manifest["metrics"])])


@app.command()
def evaluate(
    task: TaskOption = "sst2",
    data: DataOption = None,
    runs: RunsOption = RUNS,
    name: NameOption = "default",
) -> None:
    """A run's metrics on the dev split."""
    definition = _task(task)
    run = runs / "finetune" / definition.name / name
    metrics = load("train.stages:make_evaluation")(definition, run, data, report)
    show({"task": definition.name, "run": str(run), "metrics": metrics}, metric_lines(metrics))


@app.command(name="export")
def export_(
    task: TaskOption = "sst2",
    precision: PrecisionOption = "auto",
    init: InitOption = "",
    preset: PresetOption = "tiny",
    data: DataOption = None,
    runs: RunsOption = RUNS,
    name: NameOption = "default",
    force: ForceOption = False,
    bring: BringOption = False,
) -> None:
    """ONNX, through the gate: runs/export/TASK.

    Each precision is compared with PyTorch on real text; what departs is not published. auto makes all of them.
    """
    out, manifest = _export(task, precision, init, preset, data, runs, name, force, bring)
    show(manifest, [str(out), *parity_lines(manifest)])


@app.command()
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
    out = runs / "export" / _task(task).name
    if bring and not out.is_dir():
        _export(task, "auto", init, preset, data, runs, name, False, True)
    _need(out, f"bertship export --task {task}")
    folders = load("serving.repository:render")(out, target, None if precision == "auto" else precision)
    show({"models": [str(folder) for folder in folders]}, [str(folder) for folder in folders])


@app.command()
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


@app.command()
def stop(runs: RunsOption = RUNS) -> None:
    """Stop what `serve --detach` started."""
    stopped = load("serving.detached:stop_detached")(runs / "serve")
    show({"stopped": stopped}, ["stopped" if stopped else "no server was running"])


@app.command()
def ask(
    task: TaskOption = "sst2",
    text: TextOption = None,
    text_pair: TextOption = None,
    question: TextOption = None,
    context: TextOption = None,
    url: UrlOption = URL,
    timeout_s: Annotated[float, typer.Option(min=0.1)] = 30.0,
) -> None:
    """Ask a served task.

    With --text, with --text and --text-pair, or with --question and --context.
    """
    from bertship.client import Client

    columns = _columns(text, text_pair, question, context)
    with Client(url, timeout_s) as client:
        answers = client.ask(_task(task).name if task.endswith(".toml") else task, None, **columns)
    show({"answers": answers}, [json.dumps(answer, ensure_ascii=False) for answer in answers])


@app.command()
def predict(
    task: TaskOption = "sst2",
    text: TextOption = None,
    text_pair: TextOption = None,
    question: TextOption = None,
    context: TextOption = None,
    precision: PrecisionOption = "auto",
    runs: RunsOption = RUNS,
) -> None:
    """Answer without a server.

    With the exported graph, and the code that the server runs.
    """
    export = runs / "export" / _task(task).name
    _need(export, f"bertship export --task {task}")
    pipeline = load("bertship.pipeline:from_export")(export, None if precision == "auto" else precision)
    answers = pipeline.ask(_columns(text, text_pair, question, context))
    show({"answers": answers}, [json.dumps(answer, ensure_ascii=False) for answer in answers])


@app.command()
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
    definition = _task(task)
    export = runs / "export" / definition.name
    if bring and not (target / f"{definition.name}_encode" / "1" / "model.onnx").is_file():
        repository(task, "auto", "", "tiny", None, runs, "default", target, True)
    _need(export, f"bertship export --task {task}")
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


def _task(name: str) -> Any:
    return load("bertship.tasks:get_task")(name)


def _finetune(
    task: str, init: str, preset: str, data: str | None, runs: Path, name: str, settings: dict[str, str], force: bool
) -> tuple[Path, dict[str, Any]]:
    definition = _task(task)
    start = load("train.stages:find_init")(init, runs, preset, report)
    out = runs / "finetune" / definition.name / name
    manifest = load("train.stages:make_finetuning")(definition, start, out, data, settings, report, force)
    return out, manifest


def _export(
    task: str,
    precision: str,
    init: str,
    preset: str,
    data: str | None,
    runs: Path,
    name: str,
    force: bool,
    bring: bool,
) -> tuple[Path, dict[str, Any]]:
    precisions = None if precision == "auto" else _precisions(precision)
    definition = _task(task)
    run = runs / "finetune" / definition.name / name
    if bring and not run.is_dir():
        _finetune(task, init, preset, data, runs, name, {}, False)
    _need(run, f"bertship finetune --task {task}")
    out = runs / "export" / definition.name
    return out, load("export.stages:make_export")(run, out, precisions, data, report, force)


def _precisions(names: str) -> tuple[str, ...]:
    """Names parted by commas; a typo is said before anything is trained."""
    known = tuple(load("export.precision:PRECISIONS"))
    found = tuple(name.strip() for name in names.split(","))
    if unknown := [name for name in found if name not in known]:
        raise InputError(f"unknown precision {unknown[0]!r}; precisions are auto, {', '.join(known)}")
    return found


def _need(directory: Path, command: str) -> None:
    if not directory.is_dir():
        raise InputError(f"there is no {directory}; run `{command}` first, or its Make target")


def _settings(pairs: list[str] | None) -> dict[str, str]:
    settings = {}
    for pair in pairs or []:
        field, separator, value = pair.partition("=")
        if not separator or not field:
            raise InputError(f"--set {pair!r}: FIELD=VALUE is needed, such as --set learning_rate=3e-5")
        settings[field.strip()] = value.strip()
    return settings


def _columns(
    text: list[str] | None, text_pair: list[str] | None, question: list[str] | None, context: list[str] | None
) -> dict[str, list[str]]:
    given = {"TEXT": text, "TEXT_PAIR": text_pair, "QUESTION": question, "CONTEXT": context}
    columns = {name: texts for name, texts in given.items() if texts}
    if not columns:
        raise InputError("nothing to ask: give --text, or --question and --context")
    return columns


def _tasks(models: list[str]) -> list[str]:
    return [name for name in models if f"{name}_encode" in models]


def main() -> None:
    """The `bertship` command."""
    run(app)
