"""Metrics of every trajectory, independent of its system's reward, and the table of one evaluation.

A measure without a value for a question is None and left out of means. The tags of a system determine which measures it
has. A question without gold answers has no measure that compares with them, and a reward only if the system needs none.
The parts of the system's own reward are listed too, under their own names. f1_plain is F1 without the rule for yes and
no (MuSiQue's). recall_X: such a span contains a gold string. The retrieval measures count passages with a gold string
as positive. recall_X_docs: the share of the documents named in a question's metadata that its searches found or its
prompt showed, whole or as a chunk. Lengths of a trajectory that folds sum over all its contexts: response_tokens counts
each sampled token once, tokens includes the prompts of all contexts. branch_tokens counts all branches, trained or not.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Any

from thresher.engine.scoring.score import Scored
from thresher.retrieval.passages import document_of
from thresher.retrieval.questions import NAMED_DOCUMENTS
from thresher.rewards.measures import (
    answer_recalled,
    char_f1,
    compression_ratio,
    ndcg_at,
    recall_at,
    relevance_scores,
    sub_em,
)
from thresher.rewards.papers.arena import named_indices
from thresher.rewards.papers.eviomni import evidence_of, length_of_passages, rationale_of
from thresher.rewards.reward import RewardInput, Source
from thresher.rewards.statistics import intervals
from thresher.rewards.tags import blocks, up_to_answer
from thresher.rewards.text import contains_answer, exact_match, f1_score

Values = dict[str, float | None]

CUTOFF = 5  # ranks of NDCG and Recall
NAMES = {  # in the order of tables; the second word is the format of a value
    "reward": ("Reward", "number"),
    "em": ("Exact match", "share"),
    "f1": ("F1", "share"),
    "f1_plain": ("F1, yes and no as any word", "share"),
    "em_arena": ("Exact match as ARENA normalises", "share"),
    "f1_arena": ("F1 as ARENA normalises", "share"),
    "char_f1": ("F1 over characters", "share"),
    "sub_em": ("Contains a gold as substring (sub-EM)", "share"),
    "contains": ("Contains a gold answer", "share"),
    "verdict": ("Right by an LLM judge", "share"),
    "answered": ("Gave an answer", "share"),
    "recall_evidence": ("Answer recall of the evidence", "share"),
    "recall_rationale": ("Answer recall of the rationale", "share"),
    "recall_notes": ("Answer recall of the notes", "share"),
    "recall_evaluation": ("Answer recall of the evaluations", "share"),
    "recall_refinement": ("Answer recall of the refinements", "share"),
    "recall_analysis": ("Answer recall of the analysis", "share"),
    "compression": ("Compression ratio", "number"),
    "no_evidence": ("Without evidence", "share"),
    "evidence_tokens": ("Tokens of the evidence", "number"),
    "rationale_tokens": ("Tokens of the rationale", "number"),
    "entailment": ("Entailment", "share"),
    "relevance_precision": ("Precision of named references", "share"),
    "relevance_recall": ("Recall of named references", "share"),
    f"ndcg@{CUTOFF}": (f"NDCG@{CUTOFF} of the passages", "share"),
    f"recall@{CUTOFF}": (f"Recall@{CUTOFF} of the passages", "share"),
    "recall_passages": ("Answer recall of all passages", "share"),
    "recall_evidence_docs": ("Evidence documents that its searches found", "share"),
    "recall_gold_docs": ("Gold documents that its searches found", "share"),
    "actions": ("Actions", "number"),
    "invalid_actions": ("Invalid actions", "number"),
    "searches": ("Valid searches", "number"),
    "evaluations": ("Evaluations", "number"),
    "refinements": ("Refinements", "number"),
    "named": ("References named", "number"),
    "response_tokens": ("Tokens written", "number"),
    "branch_tokens": ("Tokens written in contexts of their own", "number"),
    "tokens": ("Tokens of the whole sequence", "number"),
}
LENGTHS = ("compression", "evidence_tokens", "rationale_tokens", "response_tokens", "branch_tokens", "tokens")
COUNTS = ("evaluations", "refinements", "named")  # measures that only the rewards of systems with such tags compute
# Parts of rewards that are already measures above: evaluate_contains is recall_evaluation with the reward's switches.
NOT_PARTS = frozenset(
    {"em", "f1", "answered", "searches", "evaluate_contains", "refine_contains", "entailment", *COUNTS}
)


def measures_of(entry: Scored, tags: Sequence[str] = ()) -> Values:
    """Return the measures of one trajectory, reward first. tags: the tags of its system."""
    attempt, trajectory, parts = entry.attempt, entry.trajectory, entry.result.parts
    answer, golds = entry.result.answer or "", attempt.golds
    segments = Counter(segment.source for segment in trajectory.segments)
    values: Values = {"reward": entry.result.reward} if entry.rated else {}
    values |= {name: _value(parts[name]) for name in ("em", "f1") if name in parts and entry.rated}
    if golds and {"em", "f1"} & parts.keys():
        values |= {
            "f1_plain": f1_score(answer, golds, yes_no=False),
            "em_arena": float(exact_match(answer, golds, variant="arena")),
            "f1_arena": f1_score(answer, golds, yes_no=False, variant="arena"),
            "char_f1": char_f1(answer, golds),
            "sub_em": float(sub_em(answer, golds)),
            "contains": float(contains_answer(answer, golds)),
        }
    if "answered" in parts:
        values["answered"] = _value(parts["answered"])
    # In ZeroSearch a tool of this name answers searches.
    searches = len(trajectory.searches) + sum(call["name"] == "search" for call in trajectory.tools)
    values |= {
        "actions": float(segments[Source.POLICY]),
        "invalid_actions": float(segments[Source.FEEDBACK]),
        "searches": float(searches),
        "response_tokens": float(trajectory.count(Source.POLICY)),
        "tokens": float(len(trajectory)),
    }
    values |= {name: _value(parts[name]) for name in COUNTS if name in parts}
    values |= document_recalls(entry)
    if attempt.verdict is not None and golds:
        values["verdict"] = float(attempt.verdict)
    if attempt.entailment is not None and entry.rated:
        values["entailment"] = attempt.entailment
    if trajectory.branches:
        values["branch_tokens"] = float(sum(b.count(Source.POLICY) for b in trajectory.branches.values()))
    for tag, (name, texts) in RECALL_OF_TAG.items():
        if f"<{tag}>" in tags and golds:
            values[name] = float(any(answer_recalled(text, golds) for text in texts(attempt)))
    if "<extract>" in tags and attempt.passages:
        evidence = attempt.length(evidence_of(attempt.pieces))
        values["compression"] = compression_ratio(length_of_passages(attempt), evidence)
        values["no_evidence"] = float(evidence == 0)
        values["evidence_tokens"] = float(evidence)
        if "<reason>" in tags:
            values["rationale_tokens"] = float(attempt.length(rationale_of(attempt.pieces)))
    if "<relevance>" in tags and attempt.gold_indices is not None:
        scores = relevance_scores(named_indices(attempt.pieces), attempt.gold_indices)
        values["relevance_precision"], values["relevance_recall"] = scores or (None, None)
    return values


def parts_of(entry: Scored) -> Values:
    """Return the parts of the system's own reward; None for a part that was not measured."""
    parts = entry.result.parts if entry.rated else {}
    return {name: _value(part) for name, part in parts.items() if name not in NOT_PARTS}


def document_recalls(entry: Scored) -> Values:
    """Return, for each list of documents in the question's metadata, the share that its passages come from."""
    ids = [id_ for search in entry.trajectory.searches for id_ in search.get("passages", ())]
    ids += [passage.id for passage in entry.question.passages]
    found = {*ids, *map(document_of, ids)}
    named = {key: entry.question.metadata.get(key) for key in NAMED_DOCUMENTS}
    return {
        f"recall_{key}": sum(id_ in found for id_ in wanted) / len(wanted)
        for key, wanted in named.items()
        if isinstance(wanted, list) and wanted
    }


def ranking_measures(relevant: Sequence[bool]) -> Values:
    """Return the ranking measures of the shown passages, in their order; an empty dict if there are none."""
    if not relevant:
        return {}
    return {
        f"ndcg@{CUTOFF}": ndcg_at(relevant, CUTOFF),
        f"recall@{CUTOFF}": recall_at(relevant, CUTOFF),
        "recall_passages": float(any(relevant)),
    }


def means(rows: Sequence[Mapping[str, float | None]]) -> Values:
    """Return name -> mean over the rows with a value, or None. Names are in the order of NAMES, then others."""
    names = sorted({name: None for row in rows for name in row}, key=lambda name: _PLACES.get(name, len(_PLACES)))
    return {name: mean([row.get(name) for row in rows]) for name in names}


def mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def shown(name: str, value: float | None) -> str:
    """Format a mean of this measure for display; a share as a percentage."""
    if value is None:
        return "-"
    return f"{value:.1%}" if NAMES.get(name, ("", "number"))[1] == "share" else f"{value:,.2f}"


def _value(part: float | None) -> float | None:
    return None if part is None else float(part)  # a flag is 1.0 or 0.0


def _all_spans(tag: str) -> Callable[[RewardInput], list[str]]:
    """Return a function that lists the texts of all closed `tag` spans up to the answer."""
    return lambda attempt: [span.text for span in blocks(up_to_answer(attempt.pieces), tag)]


_PLACES = {name: place for place, name in enumerate(NAMES)}
# Tag -> (measure, texts in which golds are searched). For EviOmni, as in its reward, only the first span counts.
RECALL_OF_TAG: dict[str, tuple[str, Callable[[RewardInput], list[str]]]] = {
    "extract": ("recall_evidence", lambda attempt: [evidence_of(attempt.pieces)]),
    "reason": ("recall_rationale", lambda attempt: [rationale_of(attempt.pieces)]),
    "summary": ("recall_notes", _all_spans("summary")),
    "evidence": ("recall_notes", _all_spans("evidence")),
    "evaluate": ("recall_evaluation", _all_spans("evaluate")),
    "refine": ("recall_refinement", _all_spans("refine")),
    "analysis": ("recall_analysis", _all_spans("analysis")),
}
RECALLS = tuple(dict.fromkeys(name for name, _ in RECALL_OF_TAG.values()))


@dataclass(frozen=True, slots=True)
class Measured:
    """Measures of one trajectory, and its position among the others."""

    place: tuple[int, int]  # group, sample
    measures: Values
    parts: Values
    reason: str


def measured(scored: Sequence[Scored], tags: Sequence[str] = ()) -> list[Measured]:
    """Return the measures of each trajectory. tags: the tags of the system."""
    return [
        Measured(
            (entry.trajectory.group, entry.trajectory.sample),
            measures_of(entry, tags),
            parts_of(entry),
            entry.trajectory.reason,
        )
        for entry in scored
    ]


def summary_of(rows: Sequence[Measured]) -> dict[str, Any]:
    """Return means over trajectories of the measures and of the reward's parts, and counts of reasons."""
    return {
        "questions": len(rows),
        **means([row.measures for row in rows]),
        "parts": means([row.parts for row in rows]),
        "reasons": dict(sorted(Counter(row.reason for row in rows).items())),
    }


# --- The table of one evaluation, as JSON and Markdown: means with 95% intervals, and the settings of the measurement

FACTS = {  # key in metrics.json -> name in the table
    "system": "System",
    "baseline": "Baseline",
    "switches": "Options",
    "model": "Model",
    "prompt": "Prompt",
    "lengths": "Lengths",
    "chosen": "Chosen",
    "data": "Questions",
    "golds": "Gold answers",
    "retrieval": "Passages",
    "cut": "Passages cut",
    "gold": "Gold passages",
    "roomless": "Branches",
    "noise": "Irrelevant passages added",
    "temperature": "Temperature",
    "seed": "Seed",
    "entailment_judge": "Entailment judged by",
    "verdict_judge": "Answers judged by",
    "latency": "Latency",
    "ended": "Ended",
    "tools": "Calls of tools",
}


def figures_of(measures: Sequence[Values], parts: Sequence[Values]) -> dict[str, Any]:
    """Return means, intervals and counts of the questions' measures and parts.

    Keys: each measure's mean, "parts", "intervals" ([low, high]; parts are named "parts.NAME"), "counted" (number of
    questions with a value, if some have none), and "deviations" (standard deviations of lengths).
    """
    averages, part_averages = means(measures), means(parts)
    columns = {name: [row.get(name) for row in measures] for name in averages}
    columns |= {f"parts.{name}": [row.get(name) for row in parts] for name in part_averages}
    shares = [name for name in columns if NAMES.get(name.removeprefix("parts."), ("", ""))[1] == "share"]
    found = intervals(columns, shares=shares)
    return {
        "questions": len(measures),
        **averages,
        "parts": part_averages,
        "intervals": {name: [each.low, each.high] for name, each in found.items() if each.low is not None},
        "counted": {
            name: sum(value is not None for value in column)
            for name, column in columns.items()
            if any(value is None for value in column)
        },
        "deviations": {
            name: stdev(known)
            for name in LENGTHS
            if len(known := [value for value in columns.get(name, ()) if value is not None]) > 1
        },
    }


def rows_of(figures: Mapping[str, Any]) -> list[tuple[str, str, str, int]]:
    """Return (key, mean, interval, questions) for each measure and part in `figures`, formatted as text."""
    values = {name: figures[name] for name in figures if name in NAMES}
    values |= {f"parts.{name}": value for name, value in figures["parts"].items()}
    rows = []
    for key, value in values.items():
        interval = figures["intervals"].get(key)
        between = f"{shown(key, interval[0])} to {shown(key, interval[1])}" if interval else "-"
        rows.append((key, shown(key, value), between, figures["counted"].get(key, figures["questions"])))
    return rows


def markdown(title: str, figures: Mapping[str, Any]) -> str:
    """Return the table as Markdown, after a line for each known fact of FACTS."""
    lines = [f"# {title}", ""]
    lines += [f"- {name}: {_cell(figures[key])}" for key, name in FACTS.items() if figures.get(key) is not None]
    lines += ["", "| Measure | | Mean | 95% interval | Questions |", "|---|---|--:|:-:|--:|"]
    for key, value, between, count in rows_of(figures):
        name = NAMES[key][0] if key in NAMES else f"Reward's part: {key.removeprefix('parts.')}"
        lines.append(f"| {name} | `{key}` | {value} | {between} | {count:,} |")
    if deviations := ", ".join(f"`{key}` {value:.2f}" for key, value in figures.get("deviations", {}).items()):
        lines += ["", f"Standard deviations over questions: {deviations}."]
    lines += [
        "",
        "Intervals: Wilson's where every question counts as yes or no, else percentile bootstrap over questions, 10,000"
        " resamples; - where all questions have one value. They say nothing about training seeds.",
    ]
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    """Return a value as text that cannot leave its table cell or its line."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return " ".join(text.replace("|", "\\|").split())
