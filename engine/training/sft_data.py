"""Supervised data from questions: the output of `thresher data sft`, and the data of `thresher sft` with sft.data.

    kind          prompt                          trained on
    direct        question, numbered references   the answer                                       ARENA's SFT-direct
    reasoning     the system's own (arena)        <relevance>[1,5]</relevance> <analysis> <answer> ARENA's SFT-reasoning
    qa            question, passages              the answer                                       EviOmni's generator
    closed-book   question                        the answer
    filco         question, passages              <extract>the sentences that help</extract>       FilCo's filter
    recomp        sentences to train an encoder on, no transcript: compressors/training_data.py  RECOMP's compressor
    episode       the system's own, its turns written by a script: sft_episodes.py            a warm-up
    reason-extract, extract                       evidence after its rationale, or alone, of a teacher's transcript
                  question, passages              that answers right           EviOmni's empirical study, Section 2.2

The prompts of qa and closed-book are those of the baselines full_passages, evidence and direct. The answer is the first
gold, between answer tags or plain. Where a stop at </answer> is not guaranteed (qa, closed-book, every plain answer),
the end of text follows and is trained. An analysis is written by a model that was given the gold references and the
answer (sft_analyses.py), as in the paper; without a model it is a sentence that names the references. The record's
metadata say which. engine/compressors/training_data.py selects the sentences that help.

A record is a transcript in the format of sft.py: passages and question stay data, so that nothing in them can become a
tag. A teacher's transcripts come from `thresher eval` with the system eviomni, or from any source in the format of
`thresher score`. Questions that cannot be used are returned with the reason. Deliberately absent: several answers to
one question.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thresher.common import console
from thresher.common.errors import UserError
from thresher.common.jsonl import write_jsonl
from thresher.common.records import ON_PURPOSE, read_records
from thresher.engine.baselines import load_baseline
from thresher.engine.baselines.common import BARE, TAGGED, Options, built_in
from thresher.engine.compressors.options import FILCO_TEMPLATE
from thresher.engine.episode import pair_tags
from thresher.engine.systems import load_system
from thresher.retrieval.questions import Question, passage_record
from thresher.rewards.papers.eviomni import full_answer
from thresher.rewards.tags import blocks, escape_tags
from thresher.rewards.text import exact_match

TAUGHT = {"reason-extract": ("reason", "extract"), "extract": ("extract",)}  # kind -> spans of a teacher's transcript
KINDS = ("direct", "reasoning", "qa", "closed-book")
FILCO = "filco"  # its records need a measure, which sft.format has not
RECOMP = "recomp"  # its records train an encoder: engine/compressors/training_data.py
EPISODE = "episode"  # its records belong to a recipe's system: sft_episodes.py
STYLES = ("tagged", "plain")
TEMPLATED = "templated"
ARENA_TAGS = pair_tags("relevance", "analysis", "answer")
EVIDENCE_TAGS = pair_tags("reason", "extract", "answer")
_TEMPLATES = {
    "direct": f"""Answer a question from numbered references. {TAGGED}

<question>
{{question}}
</question>

<references>
{{passages}}
</references>
""",
    "qa": built_in("passages", Options(), passages=True),
    "closed-book": built_in("direct", Options()),
    FILCO: FILCO_TEMPLATE.read_text("utf-8"),
}


@dataclass(frozen=True, slots=True)
class Unused:
    """A question that gives no record, and the reason."""

    id: str
    reason: str


def make_records(
    questions: Iterable[Question],
    kind: str,
    style: str = "tagged",
    template: str | None = None,
    analyses: Mapping[str, str | None] | None = None,
    author: str = TEMPLATED,
    evidence: Mapping[str, str] | None = None,
) -> tuple[list[dict[str, Any]], list[Unused]]:
    """Return a transcript record for each question that can be used, and the questions that cannot.

    template: replaces the kind's own; the kind reasoning has none, and its records get the recipe's. analyses: by
    question id, written by `author`; None for one that does not close. Without analyses a sentence is made from the
    references. evidence: for filco, by question id, chosen by `author`; it may be empty.
    """
    if template is None and kind != "reasoning":
        template = _TEMPLATES[kind] if style == "tagged" else _TEMPLATES[kind].replace(TAGGED, BARE)
    records, unused = [], []
    for question in questions:
        reason = why_unusable(question, kind)
        analysis = None
        if reason is None and kind == "reasoning":
            analysis = templated_analysis(question) if analyses is None else analyses.get(question.id)
            reason = None if analysis else f"{author} wrote no complete analysis"
        if reason is not None:
            unused.append(Unused(question.id, reason))
            continue
        record: dict[str, Any] = {"id": question.id, "question": question.question}
        if template is not None:
            record["template"] = template
        if kind != "closed-book":
            record["passages"] = [passage_record(passage) for passage in question.passages]
        if kind == FILCO:
            segment = _evidence((evidence or {})[question.id])
        else:
            segment = _reasoning(question, analysis) if analysis else _answer(question, kind, style)
        record["segments"] = [segment]
        written = {"measure": author} if kind == FILCO else {"analysis": author} if analysis else {}
        record["metadata"] = {"kind": kind} | written
        records.append(record)
    return records, unused


def why_unusable(question: Question, kind: str) -> str | None:
    """Return the reason why a question gives no record of this kind; None if it gives one."""
    if not question.golds or not question.golds[0].strip():
        return "its first gold answer is blank"
    if kind != "closed-book" and not question.passages:
        return "no passages"
    if kind == "reasoning" and not question.gold_indices:
        return "no gold indices"
    return None


def templated_analysis(question: Question) -> str:
    """Return a sentence that names the gold references and the answer that follows from them."""
    named = []
    for index in sorted(question.gold_indices or ()):
        title = question.passages[index - 1].title
        named.append(f"[{index}] ({title})" if title else f"[{index}]")
    listed = f"{', '.join(named[:-1])} and {named[-1]} together hold" if len(named) > 1 else f"{named[0]} holds"
    return f"{listed} what the question asks for, and the answer that follows is: {question.golds[0]}."


def _answer(question: Question, kind: str, style: str) -> dict[str, Any]:
    """Return the policy segment of an answer. Its `copied` is the answer's range, if the question or a passage contains
    it."""
    before, after = ("<answer> ", " </answer>") if style == "tagged" else ("", "")  # as TAGGED shows it
    gold = escape_tags(question.golds[0], ARENA_TAGS) if before else question.golds[0]
    segment: dict[str, Any] = {"source": "policy", "text": f"{before}{gold}{after}"}
    shown = [question.question, *(passage.text for passage in question.passages if kind != "closed-book")]
    if any(gold in text for text in shown):
        segment["copied"] = [[len(before.rstrip()), len(before) + len(gold)]]  # a name's first token includes the space
    if kind != "direct" or style == "plain":
        segment["end"] = True
    return segment


def _reasoning(question: Question, analysis: str) -> dict[str, Any]:
    indices = ",".join(map(str, sorted(question.gold_indices or ())))
    # A tag inside a section would end it: text written by a model is no more trusted than a passage.
    analysis, gold = escape_tags(analysis, ARENA_TAGS), escape_tags(question.golds[0], ARENA_TAGS)
    sections = f"<relevance>[{indices}]</relevance>\n<analysis>{analysis}</analysis>\n<answer>{gold}</answer>"
    return {"source": "policy", "text": sections}


def _evidence(text: str) -> dict[str, Any]:
    """Return the policy's segment of evidence, which is copied from the passages."""
    text, before = escape_tags(text, EVIDENCE_TAGS), "<extract>"
    copied = {"copied": [[len(before), len(before) + len(text)]]} if text else {}
    return {"source": "policy", "text": f"{before}{text}</extract>"} | copied


def taught_records(
    transcripts: str | Path, kind: str, template: str | None = None
) -> tuple[list[dict[str, Any]], list[Unused]]:
    """Return records, as in `make_records`, from a teacher's transcripts with a right answer. Each has the prompt of
    the system that will write such spans. UserError names the line of a malformed transcript."""
    from thresher.engine.scoring.transcripts import read_reward_input  # imports tokenizers, not needed for --help

    system = load_system("eviomni", {}) if kind == "reason-extract" else load_baseline("extract_only", {})
    records, unused = [], []
    for number, record in read_records(transcripts, foreign=True, remedy=ON_PURPOSE):
        attempt = read_reward_input(record, f"{transcripts}:{number}")
        spans = {tag: next((span.text for span in blocks(attempt.pieces, tag)), "") for tag in TAUGHT[kind]}
        missing = next((tag for tag, text in spans.items() if not text), None)
        if not exact_match(full_answer(attempt) or "", attempt.golds):
            unused.append(Unused(str(record["id"]), "the answer is wrong"))
        elif missing is not None:
            unused.append(Unused(str(record["id"]), f"no complete, non-empty {missing}"))
        elif not attempt.passages:
            unused.append(Unused(str(record["id"]), "no passages"))
        else:
            text = "".join(f"<{tag}> {escape_tags(text, system.tags)} </{tag}>" for tag, text in spans.items())
            records.append(
                {
                    "id": str(record["id"]),
                    "question": attempt.question,
                    "template": template or system.template,
                    "passages": [{"title": title, "text": text} for title, text in attempt.passages],
                    "segments": [{"source": "policy", "text": text}],
                    "metadata": {"kind": kind},
                }
            )
    return records, unused


def write_unused(unused: Sequence[Unused], path: Path) -> None:
    """Write a line of JSON for each question that was left out; no file if there is none."""
    if unused:
        write_jsonl(path, ({"id": question.id, "reason": question.reason} for question in unused))


def say_unused(unused: Sequence[Unused], total: int, path: Path) -> None:
    """Print how many questions were left out and why, and the file that lists them; print nothing if there is none."""
    if unused:
        counts = "; ".join(f"{count:,}: {why}" for why, count in Counter(u.reason for u in unused).most_common())
        console.console.print(
            f"{len(unused):,} of {total:,} questions gave no record ({counts}); {path} lists them",
            markup=False,
            soft_wrap=True,
        )


def refuse_nothing(records: Sequence[Any], unused: Sequence[Unused], path: str | Path, kind: str) -> None:
    """Raise UserError if no question of the file could be used."""
    if not records and not unused:
        raise UserError(f"{path}: expected transcripts or questions, found none; name another file")
    if not records:
        raise UserError(
            f"{path}: no question gives a record of the kind {kind} (the first, {unused[0].id}: {unused[0].reason}); "
            "give questions with passages (and gold_indices for reasoning, evidence for episode), and transcripts with "
            "right answers"
        )
