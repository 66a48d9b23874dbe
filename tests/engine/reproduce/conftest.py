"""The files that a command of `thresher reproduce` leaves behind, without its work."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

QUESTIONS = [{"id": str(n), "question": "?", "answer": "a", "hops": 1 + n % 2} for n in range(20)]


@pytest.fixture
def run_command() -> Callable[[list[str]], None]:
    """Return a command's stand-in that writes its last file. An evaluation is right on even questions, and more often
    with the reward."""

    def run(words: list[str]) -> None:
        out = Path(words[words.index("--out") + 1])
        out.mkdir(parents=True, exist_ok="--resume" in words)
        if words[0] == "train":
            (out / "summary.json").write_text("{}")
        if words[0] == "data":
            for name in ("test", "given_test"):
                (out / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in QUESTIONS))
        if words[0] == "extract":
            assert "--best-of" in words and out.parent.is_dir()
            record = {"golden_answers": ["a"], "evidence": "a b", "rationale": "c", "compression_ratio": 4.0}
            lines = [json.dumps({"id": str(n), **record}) + "\n" for n in range(20)]
            out.rmdir()
            out.write_text("".join(lines))
            questions = str(out.parents[1] / "world/data/given_test.jsonl")
            out.with_suffix(".json").write_text(json.dumps({"settings": {"questions": questions}, "figures": {}}))
        if words[0] == "eval":
            (out / "settings.json").write_text(json.dumps({"questions": str(out.parents[1] / "world/data/test.jsonl")}))
            step = 4 if "without" in str(out) else 2
            records = [
                {"id": str(n), "question": "?", "parts": {}, "measures": {"em": float(n % step == 0)}}
                for n in range(20)
            ]
            (out / "trajectories.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
            (out / "metrics.json").write_text("{}")

    return run
