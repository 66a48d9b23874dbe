"""The recipe of a small run with rollout.partial, and the versions of the weights that sampled its tokens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from train_cases import sampled

GROUPS, SAMPLES, STEPS = 2, 4, 5
PARTIAL: dict[str, Any] = {
    "rollout": {
        "partial": True,
        "questions_per_step": GROUPS,
        "max_staleness": 2,
        "max_num_seqs": 6,  # fewer than a step's samples, so that its own wait while later groups continue
    },
    "run": {"steps": STEPS, "save_every": 1, "eval_every": 3, "keep_checkpoints": 9},
}


def also(**changes: dict[str, Any]) -> dict[str, Any]:
    """Return the changes of a recipe, PARTIAL merged with these."""
    return {name: {**PARTIAL.get(name, {}), **changes.get(name, {})} for name in {**PARTIAL, **changes}}


def turns(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the policy's segments of a stored trajectory, those of its branches after its own."""
    branches = [segment for branch in record.get("branches", {}).values() for segment in branch]
    return [segment for segment in [*record["segments"], *branches] if segment["source"] == "policy"]


def versions_of(run: Path, step: int) -> Iterator[list[list[int]]]:
    """Yield `versions` of each turn of a step."""
    return (turn["versions"] for record in sampled(run, step) for turn in turns(record))
