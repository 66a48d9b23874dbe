"""Test how many files a GRPO step and a decoder step pass through, by a run-time trace. Limits may only be lowered.

A move is a change of file, counted once per pair of files; a return is a move into a file that was left before. Files
that alternate in a loop count once.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from layout_cases import FOLDERS, ROOT

from thresher.engine.config.recipe import Recipe
from thresher.engine.decoding.decoder import Decoder
from thresher.engine.training.step import GrpoStep
from thresher.engine.training.train import train
from thresher.policy.config import ModelConfig
from thresher.policy.model import init_policy

STEP, TOKEN = (37, 78), (14, 20)  # files, returns


class Journey:
    """Records our files in the order in which calls and returns pass through them, while `traced` functions run."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def traced(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            sys.setprofile(self._note)
            try:
                return function(*arguments, **options)
            finally:
                sys.setprofile(None)

        return call

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        here = file_of(frame)
        if here is None or event not in ("call", "return"):
            return
        caller = frame.f_back
        while caller is not None and file_of(caller) is None:
            caller = caller.f_back
        if caller is not None and (before := file_of(caller)) != here:
            assert before is not None
            self.order.append(here if event == "call" else before)

    def counts(self) -> tuple[int, int]:
        """Return the number of files, and of returns to a file that was left before."""
        moves: list[str] = []
        for name in self.order:
            if moves and moves[-1] == name:
                continue
            moves.append(name)
            while len(moves) >= 4 and moves[-2:] == moves[-4:-2]:
                del moves[-2:]
        pairs = list(dict.fromkeys(zip([None, *moves], moves, strict=False)))
        files = {name for _, name in pairs}
        return len(files), len(pairs) - len(files)


def file_of(frame: FrameType) -> str | None:
    """Return the path of a frame's file in the checkout, or None if it is not a product file."""
    path = Path(frame.f_code.co_filename)
    if ROOT not in path.parents:
        return None
    inside = path.relative_to(ROOT)
    return inside.as_posix() if inside.parts[0] in FOLDERS else None


@pytest.fixture
def recipe(make_recipe: Callable[..., Recipe], tiny_model_config: ModelConfig, tmp_path: Path) -> Recipe:
    """Return a recipe of one step of the demo's system, with a model that never searches."""
    plain = make_recipe()
    init_policy(tiny_model_config, 0).save(tmp_path / "model")
    (tmp_path / "model/tokenizer.json").write_bytes((Path(plain.model.path) / "tokenizer.json").read_bytes())
    run = {"steps": 1, "eval_every": None, "keep_trajectories": 0}
    return make_recipe(model={"path": str(tmp_path / "model")}, system={"name": "eval_rar"}, run=run)


def test_the_files_of_a_step(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Journey()
    monkeypatch.setattr(GrpoStep, "collect", step.traced(GrpoStep.collect))
    monkeypatch.setattr(GrpoStep, "learn", step.traced(GrpoStep.learn))
    train(recipe, tmp_path / "run")
    assert step.counts() <= STEP, "\n".join(dict.fromkeys(step.order))


def test_the_files_of_a_token(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token, steps, plain = Journey(), [0], Decoder.step

    def fourth(self: Decoder) -> Any:
        steps[0] += 1
        return token.traced(plain)(self) if steps[0] == 4 else plain(self)

    monkeypatch.setattr(Decoder, "step", fourth)
    train(recipe, tmp_path / "run")
    assert token.counts() <= TOKEN, "\n".join(dict.fromkeys(token.order))
