"""The command line. Results go to stdout, progress to stderr; a stage is imported when its command runs.

Exit codes: 0 done, 1 a check failed or a server could not be asked, 2 wrong usage or input, 130 interrupted.
"""

import sys
from typing import Annotated

import typer

from bertship.commands import exporting, serving, tasks, tools, training
from bertship.console import run

app = typer.Typer(
    name="bertship",
    help="Text in, a measured BERT service out: pre-train, fine-tune, export, serve and ask.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)

# in the order of the line, which is the order of `bertship --help`
for _command in (
    training.demo,
    training.corpus,
    training.pretrain,
    training.params,
    training.finetune,
    training.evaluate,
    exporting.export,
    exporting.parity,
    exporting.plan,
    exporting.predict,
    exporting.bench_engine,
    serving.repository,
    serving.serve,
    serving.health,
    serving.deploy,
    serving.stop,
    serving.ask,
    serving.bench,
    tools.playground,
    tools.compare,
    tools.doctor,
):
    app.command()(_command)
app.add_typer(tasks.app)


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


def main() -> None:
    """The `bertship` command."""
    run(app)
