"""`thresher score`: from a JSONL file of transcripts of any source to rewards, without a model and without a judge.

in  {"id", "question", "golden_answers": [..], "segments": [{"source": "prompt|policy|retrieved|feedback", "text"}, ..]}
    and further keys that some rewards read:
    "passages": [{"title", "text"}, ..], "gold_indices": [1, ..]   given with the question; indices count from 1
    "answers": {"rationale": .., "evidence": .., "full": ..}       EviOmni's three, as the policy wrote them
    "branches": {name: segments}                                   the same, as a run folder stores them
    "entailment": .87, "verdict": true                             results of judges; no judge is called here
    "metadata": {..}                                               the question's other keys
    "scores": [{"context", "text", "turns", "logprobs"}, ..]       texts that were scored, as a run folder stores them
    "group": 0                                                     its samples are rewarded together; default: the id's
out {"id", "reward", "parts": {..}, "answer"}

Lengths are in words, or in tokens if a tokenizer is given. With the run's own tokenizer segments are read from their
ids, and a stored trajectory has, to the bit, the reward that it had in the run.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from thresher.common.errors import UserError
from thresher.common.jsonl import string_field, write_jsonl
from thresher.common.records import read_records
from thresher.engine.episode import System
from thresher.engine.protocol.trajectory import are_scores
from thresher.engine.systems import load_system
from thresher.policy.tokenizer import Tokenizer, load_tokenizer
from thresher.rewards.reward import RewardInput, Source, TextSegment, count_words, hash_uniform, reward_all

ANSWERS = ("rationale", "evidence", "full")


class Attempt(NamedTuple):
    """A transcript as the input of its reward, with its id and the group in which it is rewarded."""

    id: str | int
    group: str
    attempt: RewardInput


def score_file(
    system_name: str,
    options: dict[str, Any],
    transcripts: str | Path,
    out: str | Path,
    tokenizer: str | Path | None = None,
    unverified: bool = False,
) -> dict[str, Any]:
    """Score every line of `transcripts` into `out`, in order. Return the count, the mean reward, and how many lack the
    gold answers that the reward needs, if any. tokenizer: its folder. UserError, unless `unverified`, for a file of
    ours that was changed."""
    system = load_system(system_name, options)
    encoder = None if tokenizer is None else load_tokenizer(tokenizer)
    rewards: list[float | None] = []  # None: it needs gold answers, and there is none
    seen: set[tuple[str, str]] = set()  # group and sample

    def attempts() -> Iterator[Attempt]:
        for number, record in read_records(transcripts, unverified=unverified, foreign=True):
            where = f"{transcripts}:{number}"
            attempt = read_reward_input(record, where, encoder)
            check_judged(attempt, system, where)
            group = json.dumps(record.get("group", {"id": record["id"]}))
            if system.reward_group is not None and "sample" in record:
                key = group, json.dumps(record["sample"])
                if key in seen:
                    raise UserError(
                        f"{where}: another record is sample {key[1]} of group {group} already; score the records of "
                        "one step at a time, because a group is rewarded together"
                    )
                seen.add(key)
            yield Attempt(record["id"], group, attempt)

    def scored() -> Iterator[dict[str, Any]]:
        # The attempts of a group may be anywhere in the file; a reward of one attempt needs only that attempt.
        parts = ([one] for one in attempts()) if system.reward_group is None else [list(attempts())]
        for part in parts:
            attempted, groups = [one.attempt for one in part], [one.group for one in part]
            results = reward_all(system.reward, system.reward_group, attempted, groups)
            for one, result in zip(part, results, strict=True):
                rated = bool(one.attempt.golds) or not system.needs_golds
                rewards.append(result.reward if rated else None)
                written = {"reward": result.reward, "parts": result.parts} if rated else {"reward": None, "parts": {}}
                yield {"id": one.id, **written, "answer": result.answer}
        if not rewards:  # raised here, before `out` is created
            raise UserError(f"{transcripts}: holds no transcript; expected one JSON object a line")

    write_jsonl(out, scored())
    rated = [reward for reward in rewards if reward is not None]
    found: dict[str, Any] = {"transcripts": len(rewards)} | ({"reward": sum(rated) / len(rated)} if rated else {})
    return found | ({} if len(rated) == len(rewards) else {"without_golds": len(rewards) - len(rated)})


def read_reward_input(record: dict[str, Any], where: str, tokenizer: Tokenizer | None = None) -> RewardInput:
    """Return the input of a reward for a record. UserError, starting with `where`, for missing or malformed values."""
    if "id" not in record or not isinstance(record.get("segments"), list):
        raise UserError(
            f"{where}: expected an object with id, golden_answers and a list of segments; add what is missing"
        )

    def value(key: str, expected: str, fits: Callable[[Any], bool], default: Any = None) -> Any:
        """Return the value of a key, or the default if it is absent."""
        found = record.get(key, default)
        if (key not in record and default is not None) or fits(found):
            return found
        raise UserError(f"{where}: {key}: expected {expected}, got {str(found)[:80]}")

    id_ = value("id", "a string or a whole number", lambda v: isinstance(v, str | int) and not isinstance(v, bool))
    pieces = read_pieces(record["segments"], where, tokenizer)
    passages = [
        (
            string_field({"title": "", **passage}, "title", f"{where}: passages, item {number}", may_be_empty=True),
            string_field(passage, "text", f"{where}: passages, item {number}", may_be_empty=True),
        )
        for number, passage in enumerate(
            value("passages", "a list of objects with title and text", lambda v: _is_list(v, dict), []), 1
        )
    ]
    golds = value("golden_answers", "a list of strings", lambda v: _is_list(v, str))
    question = value("question", "a string", lambda v: isinstance(v, str), "")
    gold_indices = value("gold_indices", "a list of whole numbers", lambda v: v is None or _is_list(v, int))
    for index in gold_indices or ():
        if index < 1 or (passages and index > len(passages)):  # there is a last index only if passages are given
            bound = f"of {len(passages)} passages" if passages else "of the passages"
            raise UserError(
                f"{where}: gold_indices names number {index} {bound}; they count from 1, so fix this record"
            )
    branches = _branches(record, where, tokenizer)
    entailment = value("entailment", "a number from 0 to 1", lambda v: v is None or _is_probability(v))
    return RewardInput(
        pieces=pieces,
        golds=golds,
        question=question,
        passages=passages,
        gold_indices=None if gold_indices is None else tuple(gold_indices),
        branches=branches,
        entailment=None if entailment is None else float(entailment),
        verdict=value("verdict", "true or false", lambda v: v is None or isinstance(v, bool)),
        length=count_words if tokenizer is None else lambda text: len(tokenizer.encode(text)),
        chance=hash_uniform(str(id_), pieces),
        metadata=value("metadata", "an object", lambda v: isinstance(v, dict), {}),
        scores=value("scores", "a list of objects with context, text, turns and logprobs", are_scores, []),
    )


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(x, kind) and not isinstance(x, bool) for x in value)


def _is_probability(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def check_judged(attempt: RewardInput, system: System, where: str) -> None:
    """Raise UserError if the reward depends on a judge's result that the record does not have."""
    if system.claims is not None and attempt.entailment is None and system.claims(attempt):
        raise UserError(
            f"{where}: {system.name} is rewarded for entailment, and no judge runs here; add entailment, a number "
            "from 0 to 1, or choose a variant without it"
        )
    if system.wants_verdict and attempt.verdict is None and system.answer(attempt):
        raise UserError(
            f"{where}: {system.name} is rewarded by a judge's verdict, and no judge runs here; add verdict, true "
            "or false, or choose another accuracy"
        )


def read_pieces(segments: list[Any], where: str, tokenizer: Tokenizer | None = None) -> list[TextSegment]:
    """Return a transcript's segments as bytes, from the ids if there are both ids and a tokenizer."""
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
    raise UserError(f"{where}: its ids do not decode to its text; give the run's own tokenizer, or leave the ids out")


def _branches(record: dict[str, Any], where: str, tokenizer: Tokenizer | None) -> dict[str, list[TextSegment]]:
    """Return the branches of "answers", which are all policy text, and of "branches", which name each text's source."""
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
