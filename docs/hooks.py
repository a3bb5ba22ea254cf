"""What the site has beyond the pages in this folder: the reference, made from the code, and the project's own files.

A MkDocs hook. Pages are generated in memory, so that the reference cannot fall behind the code: commands come from the
command line's own definition, fields of the configuration from its models, Python from signatures and docstrings.
"""

import enum
import importlib
import inspect
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

# what a user may import, in the order of the page; each is public by its docstring
PYTHON = {
    "Client": "bertship.client",
    "AsyncClient": "bertship.client",
    "Pipeline": "bertship.pipeline",
    "from_export": "bertship.pipeline",
    "get_task": "bertship.tasks",
    "Task": "bertship.tasks.base",
    "Files": "bertship.tasks.base",
    "Kind": "bertship.tasks.base",
    "Tokenizer": "bertship.tokenization",
    "TritonServer": "serving.server",
}
FILES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}


def on_config(config: Any) -> Any:
    """Leave out pages that are not there, and add those that nobody named."""
    there = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")} | set(generated())
    named: set[str] = set()

    def kept(entries: list[Any]) -> Iterator[Any]:
        for entry in entries:
            if isinstance(entry, dict):
                ((title, inner),) = entry.items()
                if pages := list(kept([inner] if isinstance(inner, str) else inner)):
                    yield {title: pages[0] if isinstance(inner, str) else pages}
            elif entry in there:
                named.add(entry)
                yield entry

    config.nav = list(kept(config.nav))
    if more := sorted(there - named):
        config.nav.append({"More": more})
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path, text in generated().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """A link that leads out of this folder, to a file of the project, becomes that file's path."""
    folder = (ROOT / "docs" / page.file.src_uri).parent
    if page.file.src_uri in FILES:
        folder = ROOT
    inside = {(ROOT / source).resolve(): target for target, source in FILES.items()}

    def replaced(match: re.Match[str]) -> str:
        text, address = match[1], match[2]
        path, _, anchor = address.partition("#")
        if not path or "://" in address:
            return match[0]
        target = (folder / path).resolve()
        if target in inside:
            return f"[{text}]({inside[target]}{'#' + anchor if anchor else ''})"
        if target.is_relative_to(ROOT / "docs") or not target.is_relative_to(ROOT) or not target.exists():
            return match[0]
        name = target.relative_to(ROOT).as_posix()
        return f"`{name}`" if text.strip("`") in (name, path) else f"{text} (`{name}`)"

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", replaced, markdown)


def generated() -> dict[str, str]:
    """Every page that is made here, by its path in the site."""
    pages = {
        "reference/cli.md": commands(),
        "reference/configuration.md": configuration(),
        "reference/python.md": python(),
    }
    for target, source in FILES.items():
        pages[target] = (ROOT / source).read_text(encoding="utf-8")
    return pages


# ---- the command line


def commands() -> str:
    """Each command with its help and its options."""
    import typer

    from bertship.cli import app

    group = typer.main.get_command(app)
    lines = [
        "# Commands\n",
        "Results go to stdout and progress to stderr. `--json` prints the result as one JSON object and `--debug` a "
        "traceback with an error; both may stand anywhere. Exit codes: 0 done, 1 a check failed or a server could not "
        "be asked, 2 wrong usage or input, 130 interrupted. `bertship --install-completion` lets the shell complete "
        "commands and options.\n",
    ]
    for name, command in _flat(group.commands, ""):  # type: ignore[attr-defined]
        usage = " ".join(["bertship", name, "[OPTIONS]", *(_argument(p) for p in _of(command, "argument"))])
        lines += [f"## {name}\n", f"```text\n{usage}\n```\n", f"{_paragraphs(command.help or '')}\n"]
        rows = [_option(parameter) for parameter in _of(command, "option") if "--help" not in parameter.opts]
        if rows:
            lines += ["| option | default | |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _flat(group: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.items():
        if hasattr(command, "commands"):
            yield from _flat(command.commands, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def _of(command: Any, kind: str) -> list[Any]:
    return [p for p in command.params if p.param_type_name == kind and not getattr(p, "hidden", False)]


def _argument(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name).upper() + (
        "..." if parameter.nargs == -1 or parameter.multiple else ""
    )
    return name if parameter.required else f"[{name}]"


def _option(parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    default = parameter.default
    if isinstance(default, enum.Enum):
        default = default.value
    shown = "" if default in (None, "", False, ()) or callable(default) else f"`{default}`"
    limits = getattr(parameter, "min", None), getattr(parameter, "max", None)
    bounds = {
        (True, True): f" {limits[0]} to {limits[1]}.",
        (True, False): f" At least {limits[0]}.",
        (False, True): f" At most {limits[1]}.",
    }.get((limits[0] is not None, limits[1] is not None), "")
    return f"| {names} | {shown} | {_cell((parameter.help or '') + bounds)} |"


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n"))


# ---- the configuration


def configuration() -> str:
    """Each model of `bertship/config.py` with its fields, and the presets side by side."""
    from pydantic import BaseModel

    from bertship import config

    models = [
        value
        for value in vars(config).values()
        if inspect.isclass(value)
        and issubclass(value, BaseModel)
        and value.model_fields
        and value.__module__ == config.__name__
    ]
    tables = _tables()
    lines = [
        "# Configuration\n",
        "A preset is a TOML file with the tables below; a file of your own may name any subset of the fields and is "
        "given where a preset's name is. `--set FIELD=VALUE` changes one field of a command's own table. An unknown "
        "field, a wrong type and a value out of range are refused with the field's name, the value seen and what is "
        "accepted.\n",
    ]
    for model in models:
        name = tables.get(model.__name__, "")
        lines += [f"## {model.__name__.removesuffix('Config')}{f' `[{name}]`' if name else ''}\n"]
        lines += [f"{_paragraphs(model.__doc__ or '')}\n", "| field | type | default | |", "|---|---|---|---|"]
        comments = _comments(model)
        for field, info in model.model_fields.items():
            default = "required" if info.is_required() else f"`{info.get_default(call_default_factory=True)!r}`"
            bounds = [f"{_SIGNS[key]} {value:g}" for item in info.metadata for key, value in _limits(item)]
            words = "; ".join(part for part in (comments.get(field, ""), ", ".join(bounds)) if part)
            lines.append(f"| `{field}` | {_cell(_type(info.annotation))} | {_cell(default)} | {_cell(words)} |")
        lines.append("")
    return "\n".join([*lines, *_presets()])


_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "multiple_of": "multiple of"}


def _limits(item: Any) -> list[tuple[str, Any]]:
    return [(key, getattr(item, key)) for key in _SIGNS if getattr(item, key, None) is not None]


def _type(annotation: Any) -> str:
    text = (
        annotation.__name__ if inspect.isclass(annotation) and not hasattr(annotation, "__args__") else str(annotation)
    )
    plain = re.sub(r"typing[.]", "", text)
    return f"`{plain}`"


def _tables() -> dict[str, str]:
    """Which table of a preset holds which model's fields: what the presets' own tables are called."""
    from bertship import config

    names = {table for name in config.preset_names() for table in config.load_preset(name)}
    return {
        model: table
        for table in names
        for model in (f"{table.title()}Config", "EncoderConfig" if table == "model" else "")
        if hasattr(config, model or "-")
    }


def _comments(model: Any) -> dict[str, str]:
    """The remark behind each field, by the field's name."""
    source = iter(inspect.getsource(model).splitlines(keepends=True))
    found, field, depth = {}, "", 0
    for token in tokenize.generate_tokens(lambda: next(source, "")):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(token.string, 0)
        if token.type == tokenize.NAME and token.start[1] == 4 and depth == 0:
            field = token.string
        if token.type == tokenize.COMMENT and field in model.model_fields:
            found[field] = token.string.lstrip("# ")
    return found


def _presets() -> list[str]:
    from bertship import config

    names = config.preset_names()
    presets = {name: config.load_preset(name) for name in names}
    lines = ["## Presets\n", f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    fields = dict.fromkeys((table, field) for p in presets.values() for table, fs in p.items() for field in fs)
    for table, field in fields:
        cells = [presets[name].get(table, {}).get(field, "") for name in names]
        lines.append(f"| `{table}.{field}` | {' | '.join(map(str, cells))} |")
    return [*lines, ""]


# ---- Python


def python() -> str:
    """The public names with their signatures and docstrings."""
    errors = importlib.import_module("bertship.errors")
    lines = [
        "# Python\n",
        "`from bertship import Client` needs the package alone; what is marked as of a stage runs from a checkout.\n",
    ]
    for name, module in PYTHON.items():
        thing = getattr(importlib.import_module(module), name, None)
        if thing is None:  # not there yet
            continue
        stage = "" if module.startswith("bertship") else ", of a stage"
        lines += [f"## {name}\n", f"`{module}`{stage}\n", *_described(name, thing)]
        if inspect.isclass(thing):
            for member, value in vars(thing).items():
                function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                if (
                    (member.startswith("_") and member != "__call__")
                    or not inspect.isfunction(function)
                    or not inspect.getdoc(value)
                ):
                    continue
                lines += [f"### {name}.{member}\n".replace("__", "\\_\\_"), *_described(member, value)]
    return "\n".join([*lines, "## Errors\n", "`bertship.errors`\n", f"```text\n{inspect.getdoc(errors)}\n```\n"])


def _described(name: str, thing: Any) -> list[str]:
    function = thing.fget if isinstance(thing, property) else getattr(thing, "__func__", thing)
    text = inspect.getdoc(thing) or ""
    if isinstance(thing, property):
        return [_prose(text), ""]
    try:
        signature = str(inspect.signature(function)).replace("'", '"')
    except (TypeError, ValueError):
        signature = "(...)"
    if inspect.isclass(thing):
        signature = signature.removesuffix(" -> None")
    prefix = "class " if inspect.isclass(thing) else "async def " if inspect.iscoroutinefunction(function) else "def "
    # a line a parameter, where one line is too long
    if len(signature) > 80:
        body, arrow, result = signature.rpartition(" -> ") if " -> " in signature else (signature, "", "")
        inner = ",\n    ".join(_split(body.strip()[1:-1]))
        signature = f"(\n    {inner},\n){arrow}{result}"
    signature = re.sub(r"<object object at 0x[0-9a-f]+>", "...", signature)
    signature = re.sub(r"\b(?:collections\.abc|typing|pathlib|numpy|bertship(?:\.\w+)*)\.(?=\w)", "", signature)
    return [f"```python\n{prefix}{name}{signature}\n```\n", _prose(text), ""]


def _split(parameters: str) -> list[str]:
    """A parameter list cut at its own commas, not at those in brackets or strings."""
    parts, depth, quoted = [""], 0, ""
    for letter in parameters:
        quoted = "" if letter == quoted else quoted or (letter if letter == '"' else "")
        depth += 0 if quoted else {"[": 1, "(": 1, "{": 1, "]": -1, ")": -1, "}": -1}.get(letter, 0)
        if letter == "," and not depth and not quoted:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _prose(text: str) -> str:
    """A docstring as Markdown: examples in a block of their own."""
    lines, block = [], False
    for line in text.splitlines():
        code = line.startswith(("    ", ">>>", "...")) or (block and bool(line.strip()))
        if code != block:
            lines += ["```" if block else "\n```pycon" if line.startswith(">>>") else "\n```text"]
            block = code
        lines.append(line)
    return "\n".join([*lines, *(["```"] if block else [])])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
