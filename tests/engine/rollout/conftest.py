"""Fixtures for one trajectory with scripted turns."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from rollout_cases import Make, Written

from thresher.engine.episode import System
from thresher.engine.protocol.trajectory import Trajectory
from thresher.engine.rollout.contexts import branch_seed
from thresher.engine.rollout.rollout import Job, Rollout
from thresher.retrieval.questions import Question


@pytest.fixture
def written(script: Callable[..., None], tiny_rollout: Make, tiny_questions: list[Question]) -> Written:
    """written(turns, system, question, branches={name: text}, **options of tiny_rollout) -> (rollout, trajectory)."""

    def write(
        turns: Sequence[str],
        system: str | System = "eval_rar",
        question: Question | None = None,
        branches: Mapping[str, str] | None = None,
        **options: Any,
    ) -> tuple[Rollout, Trajectory]:
        texts = {branch_seed(7, name): [text] for name, text in (branches or {}).items()}
        script({7: list(turns), **texts}, options.get("tokenizer"))
        run = tiny_rollout(system, **options)
        (trajectory,) = run.run([Job(question or tiny_questions[0], 0, 0, 7)], 1.0)
        return run, trajectory

    return write
