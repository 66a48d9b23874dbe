"""`thresher score`: a JSONL file of transcripts that anyone wrote to rewards, without a model and without a judge.

in  {"id", "question", "golden_answers": [..], "segments": [{"source": "prompt|policy|retrieved|feedback", "text"}, ..]}
    and what some rewards look at besides:
    "passages": [{"title", "text"}, ..], "gold_indices": [1, ..]   given with the question; indices count from 1
    "answers": {"rationale": .., "evidence": .., "full": ..}       EviOmni's three, as the policy wrote them
    "branches": {name: segments}                                   the same, as a run folder stores them
    "entailment": .87, "verdict": true                             what a judge said; no judge is asked here
out {"id", "reward", "parts": {..}, "answer"}

The reward reads text alone, by its source. Lengths are in words, or in tokens where a tokenizer is given. With the
run's own tokenizer a stored trajectory has, to the bit, the reward that it had in the run: segments are then read from
their ids, in which a character cut in two is not lost.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from thresher.common.errors import UserError
from thresher.common.jsonl import string_field, write_jsonl
from thresher.common.records import read_records
from thresher.engine.episode import System
from thresher.engine.systems import load_system
from thresher.policy.tokenizer import Tokenizer, load_tokenizer
from thresher.rewards.attempt import RewardInput, count_words, hash_uniform
from thresher.rewards.transcript import Source, TextSegment

ANSWERS = ("rationale", "evidence", "full")


def score_file(
    system_name: str,
    options: dict[str, Any],
    transcripts: str | Path,
    out: str | Path,
    tokenizer: str | Path | None = None,
    unverified: bool = False,
) -> dict[str, Any]:
    """Rate every line of `transcripts` into `out`, in order; returns the count and the mean reward. `tokenizer` is a
    folder that holds one. UserError, unless `unverified`, for a file of ours that is not as it was written."""
    system = load_system(system_name, options)
    encoder = None if tokenizer is None else load_tokenizer(tokenizer)
    rewards: list[float] = []

    def scored() -> Iterator[dict[str, Any]]:
        for number, record in read_records(transcripts, unverified=unverified, foreign=True):
            where = f"{transcripts}:{number}"
            attempt = read_attempt(record, where, encoder)
            check_judged(attempt, system, where)
            result = system.reward(attempt)
            rewards.append(result.reward)
            yield {
                "id": record["id"],
                "reward": result.reward,
                "parts": result.parts,
                "answer": result.answer,
            }
        if not rewards:  # raised here, before anything takes the name of `out`
            raise UserError(f"{transcripts}: holds no transcript; expected one JSON object a line")

    write_jsonl(out, scored())
    return {"transcripts": len(rewards), "reward": sum(rewards) / len(rewards)}


def read_attempt(record: dict[str, Any], where: str, tokenizer: Tokenizer | None = None) -> RewardInput:
    """A record as rewards see it. UserError, starting with `where`, for what is missing or malformed."""
    if "id" not in record or not isinstance(record.get("segments"), list):
        raise UserError(
            f"{where}: expected an object with id, golden_answers and a list of segments; add what is missing"
        )
    if not isinstance(record["id"], str | int) or isinstance(record["id"], bool):
        raise UserError(f"{where}: id: expected a string or a whole number, got {str(record['id'])[:80]}")
    pieces = read_pieces(record["segments"], where, tokenizer)
    passages = _passages(record, where)
    return RewardInput(
        pieces=pieces,
        golds=_golds(record, where),
        question=_question(record, where),
        passages=passages,
        gold_indices=_gold_indices(record, len(passages), where),
        branches=_branches(record, where, tokenizer),
        entailment=_entailment(record, where),
        verdict=_verdict(record, where),
        length=count_words if tokenizer is None else lambda text: len(tokenizer.encode(text)),
        chance=hash_uniform(str(record["id"]), pieces),
    )


def check_judged(attempt: RewardInput, system: System, where: str) -> None:
    """UserError where the reward depends on a judge's word that the record does not bring."""
    if system.claims is not None and attempt.entailment is None and system.claims(attempt):
        raise UserError(
            f"{where}: {system.name} is rewarded for entailment, and no judge is asked here; add entailment, a number "
            "from 0 to 1, or choose a variant without it"
        )
    if system.wants_verdict and attempt.verdict is None and system.answer(attempt):
        raise UserError(
            f"{where}: {system.name} is rewarded by a judge's verdict, and no judge is asked here; add verdict, true "
            "or false, or choose another accuracy"
        )


def read_pieces(segments: list[Any], where: str, tokenizer: Tokenizer | None = None) -> list[TextSegment]:
    """A transcript's segments as the rewards read them: bytes, from the ids if there are both ids and a tokenizer."""
    pieces = []
    for number, segment in enumerate(segments):
        source = segment.get("source") if isinstance(segment, dict) else None
        if source not in list(Source) or not isinstance(segment.get("text"), str):
            raise UserError(
                f"{where}: segment {number}: expected a text and a source of {', '.join(Source)}; "
                f"got {str(segment)[:80]}"
            )
        text = segment["text"].encode("utf-8", "surrogatepass")
        if tokenizer is not None and "ids" in segment:
            text = _decoded(segment["ids"], segment["text"], f"{where}: segment {number}", tokenizer)
        pieces.append(TextSegment(Source(source), text))
    return pieces


def _decoded(ids: Any, text: str, where: str, tokenizer: Tokenizer) -> bytes:
    if isinstance(ids, list) and all(isinstance(i, int) and 0 <= i < tokenizer.vocab_size for i in ids):
        decoded = tokenizer.decode_bytes(ids)
        if decoded.decode("utf-8", "replace") == text:
            return decoded
    raise UserError(f"{where}: its ids are not its text in this tokenizer; give the run's own, or leave the ids out")


def _question(record: dict[str, Any], where: str) -> str:
    question = record.get("question", "")
    if not isinstance(question, str):
        raise UserError(f"{where}: question: expected a string, got {str(question)[:80]}")
    return question


def _golds(record: dict[str, Any], where: str) -> list[str]:
    golds = record.get("golden_answers")
    if not isinstance(golds, list) or not all(isinstance(gold, str) for gold in golds):
        raise UserError(f"{where}: golden_answers: expected a list of strings, got {str(golds)[:80]}")
    return golds


def _passages(record: dict[str, Any], where: str) -> list[tuple[str, str]]:
    given = record.get("passages", [])
    if not isinstance(given, list) or not all(isinstance(passage, dict) for passage in given):
        raise UserError(f"{where}: passages: expected a list of objects with title and text, got {str(given)[:80]}")
    places = [(passage, f"{where}: passages, item {number}") for number, passage in enumerate(given, 1)]
    return [
        (
            string_field({"title": "", **passage}, "title", place, may_be_empty=True),
            string_field(passage, "text", place, may_be_empty=True),
        )
        for passage, place in places
    ]


def _gold_indices(record: dict[str, Any], passages: int, where: str) -> tuple[int, ...] | None:
    """Only where passages are given is there a last index; None where the record has no gold indices."""
    indices = record.get("gold_indices")
    if indices is None:
        return None
    if not isinstance(indices, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in indices):
        raise UserError(f"{where}: gold_indices: expected a list of whole numbers, got {str(indices)[:80]}")
    for index in indices:
        if index < 1 or (passages and index > passages):
            bound = f"of {passages} passages" if passages else "of the passages"
            raise UserError(
                f"{where}: gold_indices names number {index} {bound}; they count from 1, so fix this record"
            )
    return tuple(indices)


def _branches(record: dict[str, Any], where: str, tokenizer: Tokenizer | None) -> dict[str, list[TextSegment]]:
    """From "answers", where all of it is the policy's, or from "branches", which name the source of each text."""
    answers, stored = record.get("answers", {}), record.get("branches", {})
    if not isinstance(answers, dict) or not all(
        name in ANSWERS and isinstance(text, str) for name, text in answers.items()
    ):
        raise UserError(f"{where}: answers: expected texts under {', '.join(ANSWERS)}, got {str(answers)[:80]}")
    if not isinstance(stored, dict) or not all(isinstance(segments, list) for segments in stored.values()):
        raise UserError(f"{where}: branches: expected lists of segments by name, got {str(stored)[:80]}")
    if twice := answers.keys() & stored.keys():
        raise UserError(f"{where}: {min(twice)} is among both the answers and the branches; leave one of them out")
    branches = {name: read_pieces(segments, f"{where}: branch {name}", tokenizer) for name, segments in stored.items()}
    for name, text in answers.items():
        branches[name] = [TextSegment(Source.POLICY, text.encode("utf-8", "surrogatepass"))]
    return branches


def _entailment(record: dict[str, Any], where: str) -> float | None:
    value = record.get("entailment")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise UserError(f"{where}: entailment: expected a number from 0 to 1, got {str(value)[:80]}")
    return float(value)


def _verdict(record: dict[str, Any], where: str) -> bool | None:
    value = record.get("verdict")
    if value is not None and not isinstance(value, bool):
        raise UserError(f"{where}: verdict: expected true or false, got {str(value)[:80]}")
    return value
