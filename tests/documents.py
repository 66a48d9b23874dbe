"""Extraction of commands, Python blocks, files and links from README.md, docs/ and the Makefile.

A block is indented by four columns (in a list: by more) or fenced. In a block

    thresher ..      is a command; a backslash joins lines, and " # .." is a comment
    from .., import  in its first line of code make it Python, and so does a docstring; or a fence says `python`
    [section]        in its first line makes it a piece of a recipe

and if the paragraph above says "the whole file, `NAME`" or "one line of `NAME`", the block is that file. In prose,
`thresher ..` between backticks is a command too, complete or only named.

Deliberately absent: a Markdown parser. This reads only the form in which these documents are written.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).resolve().parent.parent
# Files that a worked example asks its reader to add: commands that name them are parsed and not run.
TO_BE_ADDED = {
    "docs/add/paper.md": ("quote",),
    "docs/add/kernel.md": ("NAME",),
    "docs/add/model.md": ("NAME",),
    "docs/add/index.md": ("lsh", "LSH256"),
    "docs/add/command.md": ("count-words", "count_words"),
}
_FENCE = re.compile(r"^\s*```(\w*)\s*$")
_INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
_FILE = re.compile(r"\b(the whole file|one line of),? `([\w./-]+)`")
_ITEM = re.compile(r"^(\s*)(?:\d+\.|-)\s")


@dataclass(frozen=True)
class Block:
    """Lines of code at a place in a document; `before` is the paragraph above, on one line."""

    document: str
    line: int
    text: str
    language: str
    before: str

    @property
    def place(self) -> str:
        return f"{self.document}:{self.line}"

    @cached_property
    def first(self) -> str:
        """Return the first line that is neither blank nor a comment."""
        lines = (line.strip() for line in self.text.splitlines())
        return next((line for line in lines if line and not line.startswith("#")), "")

    @property
    def is_python(self) -> bool:
        return self.language == "python" or (not self.language and bool(re.match(r'(from|import) \w|"""', self.first)))

    @property
    def is_toml(self) -> bool:
        return self.language == "toml" or (not self.language and bool(re.fullmatch(r"\[\w+\](\s+#.*)?", self.first)))

    @property
    def file(self) -> tuple[str, str] | None:
        """Return (name, contents) if the text says that the block is a file."""
        found = _FILE.search(self.before)
        if not found:
            return None
        one_line = found[1] == "one line of"
        return found[2], (" ".join(self.text.split()) + "\n" if one_line else self.text)


@dataclass(frozen=True)
class Command:
    """A shown command of `thresher`, without its first word."""

    document: str
    line: int
    words: tuple[str, ...]

    @property
    def place(self) -> str:
        return f"{self.document}:{self.line}"


def to_be_added(document: str, text: str) -> bool:
    """Return whether a text names what a worked example adds or, in one, has a word in capitals as a placeholder."""
    examples = TO_BE_ADDED.get(document, ())
    return any(name in text for name in examples) or (bool(examples) and bool(re.search(r"(^|\s)[A-Z]+(\s|$)", text)))


def documents() -> list[str]:
    """Return README.md and all of docs/, relative to the checkout."""
    return ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]


def read(document: str) -> list[str]:
    return (ROOT / document).read_text(encoding="utf-8").splitlines()


def blocks(document: str) -> list[Block]:
    """Return every block, in the order of the text."""
    return [part for part in _parts(document) if isinstance(part, Block)]


def prose(document: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, line) of all text outside of blocks."""
    return (part for part in _parts(document) if not isinstance(part, Block))


def commands(document: str) -> list[Command]:
    """Return the commands of `thresher` in blocks; `mentions` returns those in prose."""
    found = []
    for block in blocks(document):
        number, lines = block.line, block.text.splitlines()
        while lines:
            shown, start = lines.pop(0), number
            number += 1
            while shown.endswith("\\") and lines:
                shown = shown[:-1] + lines.pop(0)
                number += 1
            if shown.startswith("thresher "):
                found.append(Command(document, start, tuple(shlex.split(shown, comments=True)[1:])))
    return found


def mentions(document: str) -> list[Command]:
    """Return the commands of `thresher` in prose, between backticks."""
    return [
        Command(document, number, tuple(shlex.split(code)[1:]))
        for number, code in inline(document)
        if code.startswith("thresher ")
    ]


def inline(document: str) -> list[tuple[int, str]]:
    """Return (line number, code) of text between backticks, also across lines."""
    lines = dict(prose(document))
    text = "\n".join(lines.get(number, "") for number in range(1, max(lines, default=0) + 1))
    return [(text.count("\n", 0, found.start()) + 1, " ".join(found[1].split())) for found in _INLINE.finditer(text)]


def links(document: str) -> list[tuple[int, str]]:
    """Return (line number, target) of every link and picture that is not a URL."""
    return [
        (number, target)
        for number, line in prose(document)
        for target in _LINK.findall(line)
        if "://" not in target and not target.startswith("mailto:")
    ]


def table_rows(document: str, heading: str) -> list[list[str]]:
    """Return the cells of the table whose first column has this heading."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for _, line in prose(document) if line[:1] == "|"]
    start = next(number for number, row in enumerate(rows) if row[0] == heading)
    body = rows[start + 2 :]
    end = next((number for number, row in enumerate(body) if set(row[0]) <= set("|-:")), len(body) + 1)
    return body[: end - 1]


def _parts(document: str) -> Iterator[Block | tuple[int, str]]:
    lines = read(document)
    paragraph: list[str] = []
    number, margin = 0, 0  # margin: what a list adds to a block's indentation
    while number < len(lines):
        line = lines[number]
        fence = _FENCE.match(line)
        if fence or (line.startswith(" " * (4 + margin)) and not _inside(paragraph, lines, number)):
            start = number + bool(fence)
            end = _fenced(lines, start) if fence else _indented(lines, start, 4 + margin)
            text = dedent("\n".join(lines[start:end])).strip("\n") + "\n"
            yield Block(document, start + 1, text, fence[1] if fence else "", " ".join(paragraph))
            number = end + bool(fence)
            paragraph = []
            continue
        number += 1
        yield number, line
        if not line.strip():
            continue
        if item := _ITEM.match(line):
            margin = 3 if line.lstrip()[0].isdigit() else 2
            margin += len(item[1])
        elif not line.startswith(" "):
            margin = 0
        paragraph = [*paragraph, line.strip()] if lines[number - 2].strip() and number > 1 else [line.strip()]


def _inside(paragraph: list[str], lines: list[str], number: int) -> bool:
    """Return whether an indented line continues a paragraph: a block needs a blank line above it."""
    return bool(paragraph) and number > 0 and bool(lines[number - 1].strip())


def _fenced(lines: list[str], start: int) -> int:
    return next(number for number in range(start, len(lines)) if _FENCE.match(lines[number]))


def _indented(lines: list[str], start: int, width: int) -> int:
    end = start
    for number in range(start, len(lines)):
        if lines[number].strip() and not lines[number].startswith(" " * width):
            break
        if lines[number].strip():
            end = number + 1
    return end
