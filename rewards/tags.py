"""Tags in transcripts: reading them from what the policy wrote, and keeping them out of everything else.

Reading. Only POLICY pieces are looked at. Adjacent POLICY pieces (a turn sampled in several rounds) are one
stretch; a piece of any other source ends the stretch, so a span never reaches across a passage and no
passage, prompt or feedback can open, close or fill one. Tags are matched exactly, as the stop matcher of the
engine does: `</ANSWER>` and `< /answer >` are text. Bytes are parsed, since a stretch may end inside a
character; text is decoded afterwards.

Writing. `escape_tags` is applied to rendered passages, questions and feedback, after rendering, so that
nothing the user's data holds can be read as a tag even by eye or by the model.

Deliberately absent: attributes, self-closing tags, entities, nesting as a tree: these are marks, not XML.
"""

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from thresher.common.errors import UserError
from thresher.rewards.transcript import Source, TextSegment

# Printable ASCII without < and >, in names also without /.
_NAME = re.compile(r"[!-.0-;=?-~]+")
_TAG = re.compile(r"<[!-;=?-~]+>")


@dataclass(frozen=True, slots=True)
class TagSpan:
    """A closed `<tag>..</tag>` that the policy wrote.

    `text` is what stands between the tags, decoded (broken bytes become U+FFFD) and stripped. `start` and
    `end` are byte offsets into the whole transcript, all sources concatenated, from the first byte of `<tag>`
    to the one after `</tag>`; they order spans of different tags. `piece` is the index of the piece in which
    `<tag>` begins.
    """

    text: str
    start: int
    end: int
    piece: int


@dataclass(frozen=True, slots=True)
class TagEvent:
    """One opening or closing tag that the policy wrote; offsets as in `TagSpan`, over the tag itself."""

    tag: str
    closing: bool
    start: int
    end: int
    piece: int


def tag_strings(*tags: str) -> tuple[str, ...]:
    """`<tag>` and `</tag>` for each name, as `escape_tags` takes them; UserError for a bad name."""
    for tag in tags:
        if not isinstance(tag, str) or not _NAME.fullmatch(tag):
            raise UserError(f"tag name {tag!r} must be an ASCII word without <, > and /, such as 'answer'")
    return tuple(text for tag in tags for text in (f"<{tag}>", f"</{tag}>"))


def blocks(pieces: Sequence[TextSegment], tag: str) -> list[TagSpan]:
    """All closed spans of `tag` (a name, such as "search") in POLICY text, in order.

    A closing tag takes the last opening tag before it (the innermost of nested ones), back to the previous
    closing tag or the start of the stretch; one without an opening tag, and an opening tag without a closing
    one, are ignored.
    """
    opening, closing = (text.encode() for text in tag_strings(tag))
    starts = _piece_starts(pieces)
    found = []
    for offset, stretch in _policy_stretches(pieces):
        position = 0
        while (close := stretch.find(closing, position)) >= 0:
            end = close + len(closing)
            if (begin := stretch.rfind(opening, position, close)) >= 0:
                inside = stretch[begin + len(opening) : close].decode("utf-8", errors="replace").strip()
                found.append(TagSpan(inside, offset + begin, offset + end, _piece_at(starts, offset + begin)))
            position = end
    return found


def tag_sequence(pieces: Sequence[TextSegment], tags: Sequence[str]) -> list[TagEvent]:
    """Every opening and closing tag of the given names in POLICY text, in order: for checks of grammar."""
    known = sorted({text for tag in tags for text in tag_strings(tag)})
    if not known:
        return []
    pattern = re.compile(b"|".join(re.escape(text.encode()) for text in known))
    starts = _piece_starts(pieces)
    events = []
    for offset, stretch in _policy_stretches(pieces):
        for match in pattern.finditer(stretch):
            text, start = match.group().decode(), offset + match.start()
            closing = text.startswith("</")
            name = text[2 if closing else 1 : -1]
            events.append(TagEvent(name, closing, start, offset + match.end(), _piece_at(starts, start)))
    return events


def final_answer(pieces: Sequence[TextSegment], *, after: int = 0) -> str | None:
    """Return what the policy wrote in its first closed `<answer>` span that is not empty, of those that begin at the
    byte `after` of the transcript or later.

    "" where all of them are empty, None where there is none. The first such span ends the episode, so later ones never
    count, be they right or wrong. An empty one, like a stray `</answer>`, does not end it: the loops answer it with
    feedback and another turn.
    """
    answers = [span for span in blocks(pieces, "answer") if span.start >= after]
    return next((span.text for span in answers if span.text), "" if answers else None)


def up_to_answer(pieces: Sequence[TextSegment]) -> list[TextSegment]:
    """The transcript up to and including the span of the final answer; all of it where there is none.

    Transcripts from elsewhere may run on after the answer; what follows must not count.
    """
    for span in blocks(pieces, "answer"):
        if span.text:
            return _cut(pieces, span.end)
    return list(pieces)


def escape_tags(text: str, tags: Sequence[str]) -> str:
    """`text` with a space after the `<` of every tag in it: `</answer>` becomes `< /answer>`, the rest stays.

    `tags` are whole tags (see `tag_strings`). A `<` that begins a tag's head at the very end of the text
    ("..</ans") gets its space too. Hence no output holds a tag, and none begins in an output and ends in what
    is put after it; so any concatenation of outputs, with whole tags between them, holds no tag but those.
    What stands *before* an output must itself not end in a tag's head: template text, which its author
    writes, or another output. The text comes back in Unicode's NFC, the form in which Qwen's tokenizer reads
    it, for else that could still make an ASCII letter of a tag (the Kelvin sign becomes K). Idempotent. Case
    variants and tags with inner spaces are no tags and stay. Raises UserError where a tag is not of the form
    `<word>` in ASCII, since the argument rests on it.
    """
    wanted = tuple(tags)
    if not wanted:
        return text
    text = _tag_start(wanted).sub("< ", unicodedata.normalize("NFC", text))
    head = text[text.rfind("<") :] if "<" in text else ""
    if head and any(tag.startswith(head) for tag in wanted):
        text = f"{text[: len(text) - len(head)]}< {head[1:]}"
    return text


@lru_cache(maxsize=64)
def _tag_start(tags: tuple[str, ...]) -> re.Pattern[str]:
    for tag in tags:
        if not isinstance(tag, str) or not _TAG.fullmatch(tag):
            raise UserError(f"tag {tag!r} must be an ASCII word between < and >, such as '</answer>'")
    return re.compile("<(?=" + "|".join(re.escape(tag[1:]) for tag in tags) + ")")


def _policy_stretches(pieces: Sequence[TextSegment]) -> Iterator[tuple[int, bytes]]:
    """(offset in the transcript, bytes) of every maximal run of adjacent POLICY pieces."""
    offset, begin, run = 0, 0, list[bytes]()
    for piece in pieces:
        if piece.source == Source.POLICY:
            if not run:
                begin = offset
            run.append(piece.text)
        elif run:
            yield begin, b"".join(run)
            run = []
        offset += len(piece.text)
    if run:
        yield begin, b"".join(run)


def _piece_starts(pieces: Sequence[TextSegment]) -> list[int]:
    return list(accumulate((len(piece.text) for piece in pieces), initial=0))


def _piece_at(starts: list[int], offset: int) -> int:
    """Index of the piece that holds the byte at `offset`; empty pieces hold none."""
    return bisect_right(starts, offset) - 1


def _cut(pieces: Sequence[TextSegment], end: int) -> list[TextSegment]:
    kept: list[TextSegment] = []
    offset = 0
    for piece in pieces:
        if offset + len(piece.text) >= end:
            return [*kept, TextSegment(piece.source, piece.text[: end - offset])]
        kept.append(piece)
        offset += len(piece.text)
    return kept
