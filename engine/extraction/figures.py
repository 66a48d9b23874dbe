"""What the records of `thresher extract` come to: measures of one question, and their means over all.

    answers     em, f1, answered, searches: as the generator's or the agent's answer had them
    evidence    recall_evidence, recall_rationale, recall_passages: a gold answer stands in it (1 or 0);
                compression_ratio; evidence_tokens, rationale_tokens, passage_tokens
    work        extract_seconds: a batch's, shared among its questions

A measure that a question has no value for is left out of its mean, never a 0 that nobody measured.
"""

import json
import math
from collections.abc import Iterable
from statistics import stdev
from typing import Any

from thresher.common.jsonl import Record
from thresher.rewards.measures import answer_recalled

LENGTHS = ("evidence_tokens", "rationale_tokens", "passage_tokens", "compression_ratio")
STORED = ("em", "f1", "answered", "searches", *LENGTHS, "extract_seconds")


def fault_of(record: Record) -> str | None:
    """What of a record that was read from a file could not be measured, in words; None where nothing is."""
    if not isinstance(record.get("evidence"), str):
        return 'has no text as its "evidence"'
    for name in (*STORED, "cut_passages"):
        value = record.get(name)
        if value is not None and not (isinstance(value, int | float) and abs(value) < math.inf):
            return f"has {name} {json.dumps(value)}, which is no number"
    if not isinstance(record.get("rationale", ""), str):
        return 'has no text as its "rationale"'
    golds, passages = record.get("golden_answers", []), record.get("passages", [])
    if not (isinstance(golds, list) and all(isinstance(gold, str) for gold in golds)):
        return 'has no list of texts as its "golden_answers"'
    if not (
        isinstance(passages, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in passages)
    ):
        return 'has no list of passages with a "text" as its "passages"'
    return None


def record_measures(record: Record) -> dict[str, float]:
    """The measures of one question's record, without those that it has no value for."""
    found = {name: record.get(name) for name in STORED}
    if golds := record.get("golden_answers", ()):
        for name in ("evidence", "rationale"):
            if name in record:
                found[f"recall_{name}"] = answer_recalled(record[name], golds)
        if "passages" in record:
            found["recall_passages"] = any(answer_recalled(passage["text"], golds) for passage in record["passages"])
    return {name: float(value) for name, value in found.items() if value is not None}


def summarise(records: Iterable[Record]) -> dict[str, Any]:
    """Counts, the mean of every measure, and under "deviations" the deviations over questions of the lengths, for
    lengths that differ much do not fit a batch.

    compression_ratio is over questions with evidence, without_evidence counting the others; em, f1 and recall_* over
    those that have a gold answer, without_golds counting the others. cut_questions: those of which passages were cut.
    """
    values: dict[str, list[float]] = {}
    questions = without_evidence = without_golds = cut = 0
    for record in records:
        questions += 1
        without_evidence += not record["evidence"]
        without_golds += not record.get("golden_answers", ())
        cut += record.get("cut_passages", 0) > 0
        for name, value in record_measures(record).items():
            values.setdefault(name, []).append(value)
    counts = {"questions": questions, "without_evidence": without_evidence, "without_golds": without_golds}
    means = {name: sum(column) / len(column) for name, column in values.items()}
    deviations = {name: stdev(values[name]) for name in LENGTHS if len(values.get(name, ())) > 1}
    return counts | {"cut_questions": cut} | means | ({"deviations": deviations} if deviations else {})
