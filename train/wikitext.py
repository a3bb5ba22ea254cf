"""Wikitext to prose: what a reader of the article's running text would see."""

import re
from typing import Any

import mwparserfromhell
from mwparserfromhell.nodes import ExternalLink, Heading, HTMLEntity, Tag, Text, Wikilink

# containers whose content is apparatus, data or markup, not sentences
_DROPPED_TAGS = frozenset(
    {"ref", "references", "table", "tr", "td", "th", "gallery", "math", "chem", "score", "timeline", "source", "pre"}
    | {"syntaxhighlight", "code", "imagemap", "templatedata", "hiero", "inputbox", "graph", "mapframe", "style"}
)
# sections of lists, links and notes that end an article
_DROPPED_SECTIONS = frozenset(
    {"references", "notes", "footnotes", "citations", "sources", "bibliography", "works cited", "external links"}
    | {"see also", "further reading", "notes and references", "references and notes"}
)
_LANGUAGE = re.compile(r"[a-z]{2,3}(-[a-z-]+)?|simple", re.ASCII)
_QUOTES = re.compile(r"'{2,}")  # italics and bold
_SWITCH = re.compile(r"__[A-Z]+__")
_EMPTY_BRACKETS = re.compile(r"\s*[(\[][\s,;:.–—-]*[)\]]")
_BRACKET_START = re.compile(r"\(\s*[,;:]\s*")
_LIST_MARK = re.compile(r"^[*#:;]+\s*")
_SPACES = re.compile(r"[ \t\xa0]+")
_LEFT_TABLE = re.compile(r"^(\{\||\|\}|\||!)")  # a table that the parser could not close


def prose(wikitext: str) -> str:
    """Paragraphs of an article, one a line; empty when nothing but headings, templates and links is left.

    Left out: templates, tables, references, comments, file, image, category and language links, formulas and
    listings, headings, and the sections of links and notes at the end. Shown as read: link labels and entities.
    """
    parts: list[str] = []
    dropped_level = 0  # of the heading that opened a section to leave out
    for node in mwparserfromhell.parse(wikitext, skip_style_tags=True).nodes:
        if isinstance(node, Heading):
            if not dropped_level or node.level <= dropped_level:
                title = _text(node.title).strip().strip("'").lower()
                dropped_level = node.level if title in _DROPPED_SECTIONS else 0
            parts.append("\n")
        elif not dropped_level:
            parts.append(_node(node))
    return "\n".join(filter(None, map(_clean, "".join(parts).split("\n"))))


def _text(code: Any) -> str:
    return "".join(map(_node, code.nodes)) if code is not None else ""


def _node(node: Any) -> str:
    if isinstance(node, Text):
        return str(node.value)
    if isinstance(node, Wikilink):
        return _link(node)
    if isinstance(node, ExternalLink):
        return _text(node.title)
    if isinstance(node, HTMLEntity):
        try:
            return str(node.normalize())
        except (ValueError, OverflowError):  # a number that is no code point
            return ""
    if isinstance(node, Tag):
        name = str(node.tag).strip().lower()
        if name in ("br", "hr"):
            return "\n"
        return "" if name in _DROPPED_TAGS else _text(node.contents)
    return ""  # templates, arguments, comments


def _link(node: Any) -> str:
    title = str(node.title).strip()
    prefix, _, name = title.partition(":")
    space = prefix.strip().lower()
    if name and space in ("file", "image", "category", "media"):
        return ""
    if name and not name[0].isspace() and node.text is None and _LANGUAGE.fullmatch(prefix):
        return ""  # the article in another language; a title such as "War: a history" is none
    return _text(node.text) if node.text is not None else _text(node.title).removeprefix(":")


def _clean(line: str) -> str:
    if _LEFT_TABLE.match(line.strip()):
        return ""
    line = _SWITCH.sub("", _QUOTES.sub("", line))
    line = _BRACKET_START.sub("(", _EMPTY_BRACKETS.sub("", line))  # around what a template said
    line = _SPACES.sub(" ", _LIST_MARK.sub("", line.strip())).strip()
    return line if any(map(str.isalnum, line)) else ""
