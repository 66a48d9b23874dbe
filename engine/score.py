"""`thresher score`: rate transcripts that anyone wrote, with a system's own reward.

in  {"id", "question", "golden_answers": [..], "segments": [{"source": "prompt|policy|retrieved|feedback", "text"}, ..]}
out {"id", "reward", "parts": {..}, "answer"}

Only text is needed: the reward reads the bytes of the policy's segments and nothing else.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from thresher.engine.systems import load_system
from thresher.retrieval.jsonl import iter_jsonl, write_jsonl
from thresher.rewards.errors import UserError
from thresher.rewards.transcript import Piece, Source


def score_file(system_name: str, options: dict[str, Any], transcripts: str | Path, out: str | Path) -> dict[str, Any]:
    """Rate every line of `transcripts` into `out`, in order; returns the count and the mean reward."""
    system = load_system(system_name, options)
    rewards: list[float] = []

    def rated() -> Iterator[dict[str, Any]]:
        for number, record in iter_jsonl(transcripts):
            where = f"{transcripts}:{number}"
            pieces, golds = read_pieces(record, where), _golds(record, where)
            result = system.reward(pieces, golds)
            rewards.append(result.reward)
            yield {
                "id": record["id"],
                "reward": result.reward,
                "parts": result.parts,
                "answer": result.answer,
            }
        if not rewards:  # raised here, before anything takes the name of `out`
            raise UserError(f"{transcripts}: holds no transcript; expected one JSON object a line")

    write_jsonl(out, rated())
    return {"transcripts": len(rewards), "reward": sum(rewards) / len(rewards)}


def read_pieces(record: dict[str, Any], where: str) -> list[Piece]:
    """A transcript's segments as the rewards read them."""
    segments = record.get("segments")
    if "id" not in record or not isinstance(segments, list):
        raise UserError(
            f"{where}: expected an object with id, golden_answers and a list of segments; add what is missing"
        )
    pieces = []
    for number, segment in enumerate(segments):
        source = segment.get("source") if isinstance(segment, dict) else None
        if source not in list(Source) or not isinstance(segment.get("text"), str):
            raise UserError(
                f"{where}: segment {number}: expected a text and a source of {', '.join(Source)}; "
                f"got {str(segment)[:80]}"
            )
        pieces.append(Piece(Source(source), segment["text"].encode("utf-8", "surrogatepass")))
    return pieces


def _golds(record: dict[str, Any], where: str) -> list[str]:
    golds = record.get("golden_answers")
    if not isinstance(golds, list) or not all(isinstance(gold, str) for gold in golds):
        raise UserError(f"{where}: golden_answers: expected a list of strings, got {str(golds)[:80]}")
    return golds
