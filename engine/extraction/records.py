"""Records of `thresher extract`, the file to which they are appended, and their figures.

F.jsonl    one record per question, appended as soon as it is known, with checksums (common/records.py)
F.json     {"settings": .., "figures": .., "records": ..}; figures, and the mark of F.jsonl, once the run is complete
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import stdev
from typing import Any

from thresher.common.errors import UserError
from thresher.common.jsonl import Record
from thresher.common.records import RecordLog, read_object, write_object, write_records
from thresher.engine.extraction.extractor import Extraction
from thresher.engine.scoring.score import Scored
from thresher.retrieval.questions import Question, passage_record
from thresher.rewards.measures import answer_recalled

REMEDY = "put a copy back, or choose another file to write"
LENGTHS = ("evidence_tokens", "rationale_tokens", "passage_tokens", "compression_ratio")
STORED = ("em", "f1", "answered", "searches", *LENGTHS, "extract_seconds")


class Journal:
    """The files F.jsonl and F.json. With equal settings existing files are resumed: an incomplete last line is cut off,
    and a record that lacks one of `needed` is partial until a complete one supersedes it.

    done: ids with a complete record. partial: records that lack a key, by id. The caller holds the lock
    (`locked_file`). UserError for a file with other settings or of another program, and for a line in another form.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any], needed: Iterable[str]) -> None:
        self.path = Path(path)
        if self.path.suffix != ".jsonl":
            raise UserError(f"{path}: expected a name that ends in .jsonl, since it grows line by line")
        self.side = self.path.with_suffix(".json")
        self.settings = json.loads(json.dumps(settings))
        self.done: set[str] = set()
        self.partial: dict[str, Record] = {}
        self._superseded = False
        self._needed = tuple(needed)
        self._log = RecordLog(self.path, remedy=REMEDY)
        if self.path.exists():
            self._resume()

    def add(self, record: Record) -> None:
        """Append a record; when this returns, it survives a kill of the process."""
        if not self.path.exists():
            self._write_side({})  # first, because a file without it cannot be resumed
        self._log.append(record)
        self._note(record)

    def records(self) -> Iterator[Record]:
        """Yield all records, after superseded ones have been dropped from the file."""
        if self._superseded:
            last = {record["id"]: number for number, record in self._log.recover()}
            write_records(self.path, (r for number, r in self._log.recover() if last[r["id"]] == number), closed=False)
            for _ in self._log.recover():
                pass
            self._superseded = False
        return (record for _, record in self._log.recover())

    def finish(self, figures: Mapping[str, Any]) -> None:
        self._write_side({"figures": figures, "records": self._log.finish()})

    def _write_side(self, more: Mapping[str, Any]) -> None:
        write_object(self.side, {"settings": self.settings, **more})

    def _resume(self) -> None:
        if not self.side.exists():
            raise UserError(f"{self.path}: exists, but without the {self.side.name} needed to resume; choose another")
        side = read_object(self.side, remedy=REMEDY)
        made = side.get("settings")
        made = made if isinstance(made, dict) else {}
        for key in {**made, **self.settings}:
            if made.get(key) != self.settings.get(key):
                raise UserError(
                    f"{self.path}: was begun with {key} {json.dumps(made.get(key))}, not "
                    f"{json.dumps(self.settings.get(key))}; choose another file, or the settings in {self.side}"
                )
        for number, record in self._log.recover(side.get("records")):
            if fault := fault_of(record):
                raise UserError(f"{self.path}:{number}: {fault}; choose another file to write, or delete this one")
            self._note(record)

    def _note(self, record: Record) -> None:
        id_ = record["id"]
        self._superseded |= id_ in self.done or id_ in self.partial
        if all(key in record for key in self._needed):
            self.partial.pop(id_, None)
            self.done.add(id_)
        elif id_ not in self.done:
            self.partial[id_] = record


def question_head(question: Question) -> Record:
    head: Record = {"id": question.id, "question": question.question}
    return head | {"golden_answers": list(question.golds)} if question.golds else head


def extraction_record(extraction: Extraction) -> Record:
    """Return the record of an extraction. Lengths are in tokens of the extractor."""
    reasoned = {"rationale": extraction.rationale, "rationale_tokens": extraction.rationale_tokens}
    return {
        "passages": [passage_record(passage) for passage in extraction.passages],
        "cut_passages": extraction.cut_passages,
        **(reasoned if extraction.rationale is not None else {}),
        "evidence": extraction.evidence,
        "passage_tokens": extraction.passage_tokens,
        "evidence_tokens": extraction.evidence_tokens,
        "compression_ratio": extraction.compression_ratio,
        "ended": extraction.reason,
    }


def answer_record(response: Scored) -> Record:
    """Return the record of an answer. It has em and f1 only if the question has gold answers."""
    measures = ("em", "f1", "answered") if response.question.golds else ("answered",)
    return {
        "answer": response.result.answer,
        **{name: response.result.parts[name] for name in measures if name in response.result.parts},
        "answer_ended": response.trajectory.reason,
    }


def fault_of(record: Record) -> str | None:
    """Describe the first fault of a stored record that prevents measuring it; None if there is none."""
    if not isinstance(record.get("id"), str):
        return 'has no "id"'
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
    """Return the measures of one question's record, without those that have no value."""
    found = {name: record.get(name) for name in STORED}
    if golds := record.get("golden_answers", ()):
        for name in ("evidence", "rationale"):
            if name in record:
                found[f"recall_{name}"] = answer_recalled(record[name], golds)
        if "passages" in record:
            found["recall_passages"] = any(answer_recalled(passage["text"], golds) for passage in record["passages"])
    return {name: float(value) for name, value in found.items() if value is not None}


def summarise(records: Iterable[Record]) -> dict[str, Any]:
    """Return counts, the mean of every measure, and under "deviations" the standard deviations of lengths.

        answers     em, f1, answered, searches: of the generator's or the agent's answer
        evidence    recall_evidence, recall_rationale, recall_passages: the text contains a gold answer (1 or 0);
                    compression_ratio; evidence_tokens, rationale_tokens, passage_tokens
        work        extract_seconds: the time of a batch, divided among its questions
        counts      without_evidence, without_golds; cut_questions: questions with passages cut to fit

    A mean is over the questions that have a value: compression_ratio over those with evidence, em, f1 and recall_* over
    those with gold answers.
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
