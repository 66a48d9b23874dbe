"""Tags in transcripts: reading them from the policy's text, checking their order, escaping them in other text.

Only POLICY segments are read. Adjacent ones form one stretch; a segment of another source ends it, so a span never
crosses a passage. Tags match exactly, as in the engine's stop matcher: `</ANSWER>` and `< /answer >` are text. Bytes
are parsed, because a stretch may end inside a character; text is decoded afterwards.
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from thresher.common.errors import UserError
from thresher.rewards.reward import Source, TextSegment

# Printable ASCII except < and >, in names also except /.
_NAME = re.compile(r"[!-.0-;=?-~]+")
_TAG = re.compile(r"<[!-;=?-~]+>")
# Qwen's end-of-text tokens. Transcripts of other programs contain their text; ours end at the tag before.
_THE_END = re.compile(r"(?:\s|<\|im_end\|>|<\|endoftext\|>)*+")


@dataclass(frozen=True, slots=True)
class TagSpan:
    """A closed `<tag>..</tag>` in the policy's text.

    text: between the tags, decoded (invalid bytes become U+FFFD) and stripped. start, end: byte offsets in the whole
    transcript, all sources concatenated, from the first byte of `<tag>` to the one after `</tag>`.
    """

    text: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TagEvent:
    """An opening or closing tag in the policy's text; offsets as in `TagSpan`, of the tag itself."""

    tag: str
    closing: bool
    start: int
    end: int


def tag_strings(*tags: str) -> tuple[str, ...]:
    """Return `<tag>` and `</tag>` for each name, as arguments of `escape_tags`. UserError for an invalid name."""
    for tag in tags:
        if not isinstance(tag, str) or not _NAME.fullmatch(tag):
            raise UserError(f"tag name {tag!r} must be an ASCII word without <, > and /, such as 'answer'")
    return tuple(text for tag in tags for text in (f"<{tag}>", f"</{tag}>"))


def blocks(pieces: Sequence[TextSegment], tag: str) -> list[TagSpan]:
    """Return all closed spans of `tag` (a name, such as "search") in POLICY text, in order.

    A closing tag is paired with the last opening tag before it (the innermost of nested ones), back to the previous
    closing tag or the start of the stretch. Tags without a partner are ignored.
    """
    opening, closing = (text.encode() for text in tag_strings(tag))
    found = []
    for offset, stretch in _policy_stretches(pieces):
        position = 0
        while (close := stretch.find(closing, position)) >= 0:
            end = close + len(closing)
            if (begin := stretch.rfind(opening, position, close)) >= 0:
                inside = stretch[begin + len(opening) : close].decode("utf-8", errors="replace").strip()
                found.append(TagSpan(inside, offset + begin, offset + end))
            position = end
    return found


def tag_sequence(pieces: Sequence[TextSegment], tags: Sequence[str]) -> list[TagEvent]:
    """Return every opening and closing tag of the given names in POLICY text, in order."""
    known = sorted({text for tag in tags for text in tag_strings(tag)})
    if not known:
        return []
    pattern = re.compile(b"|".join(re.escape(text.encode()) for text in known))
    events = []
    for offset, stretch in _policy_stretches(pieces):
        for match in pattern.finditer(stretch):
            text = match.group().decode()
            events.append(TagEvent(text.strip("</>"), text[1] == "/", offset + match.start(), offset + match.end()))
    return events


def final_answer(pieces: Sequence[TextSegment], *, after: int = 0) -> str | None:
    """Return the policy's first closed `<answer>` with text in it that begins at byte `after` or later.

    "" if all are empty, None if there are none. The first one ends the episode, so later ones never count. An empty one
    does not end it: the loops respond with feedback and another turn.
    """
    answers = [span for span in blocks(pieces, "answer") if span.start >= after]
    return next((span.text for span in answers if span.text), "" if answers else None)


def up_to_answer(pieces: Sequence[TextSegment]) -> list[TextSegment]:
    """Return the transcript cut after the span of the final answer, if any; later text must not count."""
    end = next((span.end for span in blocks(pieces, "answer") if span.text), None)
    if end is None:
        return list(pieces)
    kept: list[TextSegment] = []
    for piece in pieces:
        kept.append(TextSegment(piece.source, piece.text[:end]))
        end -= len(piece.text)
        if end <= 0:
            break
    return kept


def outline(
    pieces: Sequence[TextSegment], tags: Sequence[str], *, retrieved: str | None = None, prose: bool = False
) -> tuple[str, ...] | None:
    """Return the names of the transcript's sections, in order; None if it does not consist of closed sections.

    A section is `<tag>..</tag>` of a name in `tags`, opened and closed in one stretch, with any text in it except the
    grammar's tags. retrieved: name of the section that a run of RETRIEVED segments forms, which the policy must then
    not write; None: they are context, as PROMPT is. Between sections only white space is allowed, or with `prose` any
    text; FEEDBACK is such text. After the last section only white space and end-of-text tokens are allowed.
    """
    runs = [
        (source, b"".join(piece.text for piece in run))
        for source, run in groupby(pieces, key=lambda piece: piece.source)
    ]
    known = list(tags) if retrieved is None else [*tags, retrieved]
    names: list[str] = []
    for number, (source, text) in enumerate(runs, start=1):
        if source == Source.RETRIEVED and retrieved is not None:
            names.append(retrieved)
        elif source == Source.FEEDBACK and text.strip() and not prose:
            return None
        elif source == Source.POLICY:
            sections = _sections(text, known, at_end=number == len(runs), prose=prose)
            if sections is None or retrieved in sections:
                return None
            names += sections
    return tuple(names)


def _sections(text: bytes, tags: Sequence[str], at_end: bool, prose: bool) -> list[str] | None:
    names: list[str] = []
    opened: str | None = None
    position = 0
    for event in tag_sequence([TextSegment(Source.POLICY, text)], tags):
        if opened is None:
            between = text[position : event.start].decode("utf-8", errors="replace")
            if event.closing or not (prose or not between.strip()):
                return None
            opened = event.tag
        elif event.closing and event.tag == opened:
            names.append(opened)
            opened, position = None, event.end
        else:
            return None
    rest = text[position:].decode("utf-8", errors="replace")
    ended = _THE_END.fullmatch(rest) is not None if at_end else prose or not rest.strip()
    return names if opened is None and ended else None


def escape_tags(text: str, tags: Sequence[str]) -> str:
    """Insert a space after the `<` of every tag in `text`: `</answer>` becomes `< /answer>`. Idempotent.

    `tags` are whole tags (see `tag_strings`). A `<` that begins a prefix of a tag at the very end of the text
    ("..</ans") is escaped too. Hence no output contains a tag, and a concatenation of outputs with whole tags between
    them contains only those. The text before an output must not end in a prefix of a tag. The result is in Unicode's
    NFC, the form in which Qwen's tokenizer reads it, because NFC can create an ASCII letter of a tag (the Kelvin sign
    becomes K). UserError if a tag is not of the form `<word>` in ASCII.
    """
    wanted = tuple(tags)
    if not wanted:
        return text
    text = _tag_start(wanted).sub("< ", unicodedata.normalize("NFC", text))
    before, bracket, head = text.rpartition("<")
    if bracket and any(tag.startswith(f"<{head}") for tag in wanted):
        text = f"{before}< {head}"
    return text


@lru_cache(maxsize=64)
def _tag_start(tags: tuple[str, ...]) -> re.Pattern[str]:
    for tag in tags:
        if not isinstance(tag, str) or not _TAG.fullmatch(tag):
            raise UserError(f"tag {tag!r} must be an ASCII word between < and >, such as '</answer>'")
    return re.compile("<(?=" + "|".join(re.escape(tag[1:]) for tag in tags) + ")")


def _policy_stretches(pieces: Sequence[TextSegment]) -> Iterator[tuple[int, bytes]]:
    """Yield (offset in the transcript, bytes) of every maximal run of adjacent POLICY segments."""
    offset = 0
    for written, run in groupby(pieces, key=lambda piece: piece.source == Source.POLICY):
        text = b"".join(piece.text for piece in run)
        if written:
            yield offset, text
        offset += len(text)
