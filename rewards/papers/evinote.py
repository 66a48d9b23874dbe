"""EviNote-RAG: search, then note the evidence for an answer; notes that entail the answer are rewarded.

    (<search> <information> <summary>)+ <answer>     in the prompt; information is RETRIEVED, all else the policy's

    R = 1 + EQR    if format and answer hold                                   (Eq. 5)
        .1 + EQR   if format and note-taking hold, the answer does not
        0          else
    EQR = P(the last note entails "<gold> is the answer to '<question>'"), the largest over the golds     (Eq. 4)

    format       an answer, at least one note, and these tags in this order, each closed: Eq. 5 requires no note for
                 each search. Thoughts and other text may stand between them; a note follows the passages of a search,
                 and a note or an answer without text does not count [assumed]. `note_every_search`: as in the first
                 line above. `strict_format`: so too, a think only before a search or the answer, and only white space
                 between sections
    answer       EM
    note-taking  the notes carry both marks: `*` for key facts, `-` for uncertain ones, also printed as an en dash
                 (with a switch either one; or, as in its released code, every `*` and `#` in them belongs to a pair,
                 and there is at least one)

A mark is a pair around text (`*x*`, `-x-`) or a list marker that begins a line (`* x`, `- x`), in a note that the
policy wrote. A hyphen inside a word is not a mark; the prompt's text about marks is not a note.

The ablation's variants, where `noted` means that there is a note:

    Base, NS, NE   EM [assumed]: Search-R1; a naive summary; `<evidence>` instead of `<summary>`
    FS             EM if noted, else 0                FS+EQR    EM + EQR if noted, else 0
    FS+SR          FS, but .1 for a wrong answer that is noted, with probability 1/3 (`RewardInput.chance` decides)
    SEN            R with EQR 0                       SEN+EQR   R

The judge's probability for `evinote_claims` is an input.
"""

import re
from collections.abc import Sequence
from typing import Literal, get_args

from thresher.common.errors import UserError
from thresher.rewards.measures import answer_measures
from thresher.rewards.papers.search import valid_searches
from thresher.rewards.reward import RewardInput, RewardResult, TextSegment
from thresher.rewards.tags import blocks, final_answer, outline, up_to_answer
from thresher.rewards.text import normalize_answer

Variant = Literal["Base", "NS", "NE", "FS", "FS+SR", "FS+EQR", "SEN", "SEN+EQR"]
Marks = Literal["both", "either", "code"]

# The tag of each variant's notes; Base has none.
NOTE_TAGS: dict[str, str | None] = {
    variant: {"Base": None, "NE": "evidence"}.get(variant, "summary") for variant in get_args(Variant)
}
CLAIM = "{gold} is the answer to '{question}'"
CONSOLATION = 0.1
CHANCE_OF_CONSOLATION = 1 / 3


def evinote_reward(
    attempt: RewardInput,
    *,
    variant: Variant = "SEN+EQR",
    marks: Marks = "both",
    note_every_search: bool = False,
    strict_format: bool = False,
) -> RewardResult:
    """Compute the reward of one of the eight variants; the other switches as described above.

    Parts, in every variant: format, answer, notes (note-taking), each 1 or 0, and entailment (the judge's probability;
    0 without a note; None if the variant does not reward it and there was no judge). Measures em, f1, answered,
    searches. UserError if the variant rewards EQR, there is a claim to judge, and there was no judge.
    """
    if variant not in NOTE_TAGS:
        raise UserError(f"variant {variant!r} is unknown; choose one of {', '.join(NOTE_TAGS)}")
    if marks not in get_args(Marks):
        raise UserError(f"marks {marks!r} is unknown; choose one of {', '.join(get_args(Marks))}")
    tag = NOTE_TAGS[variant]
    answer = final_answer(attempt.pieces)
    measures = answer_measures(answer, attempt.golds)
    noted = notes(attempt.pieces, tag) if tag else []
    parts = {
        "format": float(_formatted(attempt.pieces, tag, note_every_search, strict_format)),
        "answer": float(measures["em"]),
        "notes": float(_marked(noted, marks)),
    }
    rewarded = variant.endswith("+EQR")
    entailment = _entailment(attempt, variant) if rewarded or attempt.entailment is not None else None
    eqr = (entailment or 0.0) if rewarded else 0.0
    if variant.startswith("SEN"):
        base = parts["answer"] or CONSOLATION * parts["notes"]
        reward = base + eqr if parts["format"] and base else 0.0
    elif variant.startswith("FS"):
        lucky = variant == "FS+SR" and answer is not None and attempt.chance < CHANCE_OF_CONSOLATION
        reward = (parts["answer"] or CONSOLATION * lucky) + eqr if noted else 0.0
    else:
        reward = parts["answer"]
    measures["searches"] = len(valid_searches(attempt.pieces))
    return RewardResult(reward, {**parts, "entailment": entailment, **measures}, answer)


def evinote_claims(attempt: RewardInput, tag: str = "summary") -> list[tuple[str, str]]:
    """Return (the last note, "<gold> is the answer to '<question>'") for each gold, for a judge of entailment.

    Empty without a note. Golds that are empty after normalisation are left out.
    """
    noted = notes(attempt.pieces, tag)
    if not noted:
        return []
    golds = [gold for gold in attempt.golds if normalize_answer(gold)]
    return [(noted[-1], CLAIM.format(gold=gold, question=attempt.question)) for gold in golds]


def notes(pieces: Sequence[TextSegment], tag: str = "summary") -> list[str]:
    """Return the policy's closed notes that contain text, up to the end of its final answer, in order."""
    return [span.text for span in blocks(up_to_answer(pieces), tag) if span.text]


def has_mark(note: str, mark: str) -> bool:
    """Return whether a note has `mark`, "*" or "-", as a list marker or as a pair around text in one line.

    An en dash is a "-": the paper prints both.
    """
    lines = note.replace("\u2013", "-").splitlines()
    return any(_is_item(line, mark) or _holds_pair(line, mark) for line in lines)


def _formatted(pieces: Sequence[TextSegment], tag: str | None, every: bool, strict: bool) -> bool:
    tags = ("think", "search", "answer", *([tag] if tag else []))
    names = outline(pieces, tags, retrieved="information", prose=not strict)
    if names is None or (tag and tag not in names):
        return False
    note, think = f"(?:{tag} ){'' if every or strict else '?'}" if tag else "", "(?:think )?" if strict else ""
    turns = re.compile(rf"(?:{think}search information {note})+{think}answer ")
    if not turns.fullmatch("".join(f"{name} " for name in names if strict or name != "think")):
        return False
    return all(span.text for name in ("answer", tag) if name for span in blocks(pieces, name))


def _marked(noted: Sequence[str], marks: Marks) -> bool:
    if marks == "code":
        return _paired("".join(noted))
    carried = [any(has_mark(note, mark) for note in noted) for mark in "*-"]
    return all(carried) if marks == "both" else any(carried)


def _paired(text: str) -> bool:
    """Return whether the text has marks `*` or `#`, all of them in pairs that do not cross."""
    opened: list[str] = []
    marks = re.findall("[*#]", text)
    for mark in marks:
        if opened[-1:] == [mark]:
            opened.pop()
        else:
            opened.append(mark)
    return bool(marks) and not opened


def _entailment(attempt: RewardInput, variant: Variant) -> float:
    tag = NOTE_TAGS[variant]
    if tag is None or not evinote_claims(attempt, tag):
        return 0.0
    if attempt.entailment is None:
        raise UserError(
            f"EviNote's variant {variant} rewards entailment, and no judge has given a probability; give a judge, "
            "an entailment with each transcript, or a variant without EQR"
        )
    if not 0 <= attempt.entailment <= 1:
        raise UserError(f"entailment {attempt.entailment} is not a probability; give a number from 0 to 1")
    return float(attempt.entailment)


def _is_item(line: str, mark: str) -> bool:
    line = line.lstrip()
    return line[:1] == mark and line[1:2].isspace() and any(map(_is_word, line))


def _holds_pair(line: str, mark: str) -> bool:
    """Return whether a run of marks opens (text directly after) and a later one closes (text directly before)."""
    opened = False
    for begin, end in (match.span() for match in re.finditer(re.escape(mark) + "+", line)):
        before, after = line[begin - 1 : begin], line[end : end + 1]
        if opened and before and not before.isspace() and not _is_word(after):
            return True
        opened = opened or (bool(after) and not after.isspace() and not _is_word(before))
    return False


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"
