"""Check that a transcript is exactly the sections that a paper prescribes, and nothing else.

`outline` reduces a transcript to the names of its sections, in order; a system compares that with what it asks for.

- Every section is `<tag>..</tag>`, closed where it was opened: nothing of another source can open, close or fill it.
- Between sections there may be white space only, or with `prose` any text. Inside, text is free (`x < y`, `<b>`,
  `[1]`), but for the grammar's own tags, opening or closing: a section in a section is none.
- RETRIEVED text is one section, whatever a passage in it says, in systems that search; a tag of that name written
  by the policy is then out of place. In systems that are given their passages it is context, as PROMPT is everywhere.
- FEEDBACK stands where a turn was no valid action, so a transcript with feedback in it is in no strict form; with
  `prose` it is text between sections.
- The end: text of an end-of-text token behind the last section is the end, not writing. A turn that stops at a tag may
  also carry what its last token holds behind the tag; white space there is fine, anything else is not.

Deliberately absent: a parse tree, attributes, and leniency. What a reward needs of a transcript in a bad form (its
answer, its notes) it reads with tags.py, which looks at each tag for itself.
"""

import re
from collections.abc import Sequence
from itertools import groupby

from thresher.rewards.tags import tag_sequence
from thresher.rewards.transcript import Source, TextSegment

# Qwen's end-of-text tokens. Transcripts from elsewhere hold their text; ours end at the tag before.
_THE_END = re.compile(r"(?:\s|<\|im_end\|>|<\|endoftext\|>)*+")


def outline(
    pieces: Sequence[TextSegment], tags: Sequence[str], *, retrieved: str | None = None, prose: bool = False
) -> tuple[str, ...] | None:
    """The names of the transcript's sections, in order; None where it is not made of closed sections alone.

    tags: all names of the grammar, such as "think"; the policy may write a section of each. retrieved: the name under
    which a run of RETRIEVED pieces counts as a section (None: it does not), which is then no section for the policy to
    write. prose: text may stand between sections, though not behind the last. Time is linear in the length of the text.
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
            written = _written(text, known, at_end=number == len(runs), prose=prose)
            if written is None or retrieved in written:
                return None
            names += written
    return tuple(names)


def _written(text: bytes, tags: Sequence[str], at_end: bool, prose: bool) -> list[str] | None:
    """The sections of one stretch of the policy's own."""
    names: list[str] = []
    opened: str | None = None
    position = 0
    for event in tag_sequence([TextSegment(Source.POLICY, text)], tags):
        if opened is None:
            if event.closing or not (prose or _blank(text[position : event.start])):
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


def _blank(text: bytes) -> bool:
    return not text.decode("utf-8", errors="replace").strip()
