"""`thresher.engine.GRPO`: rewards by their parameters, the run that it makes, and refusals."""

import importlib
import inspect
import json
import runpy
import signal
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stored_cases import stored

from thresher.cli.main import run
from thresher.common import signals
from thresher.common.errors import UserError
from thresher.engine import GRPO
from thresher.engine import grpo as grpo_module
from thresher.engine.config.recipe import Recipe
from thresher.engine.config.sections import SystemSection
from thresher.engine.store.run_folder import RunFolder, best_checkpoint
from thresher.engine.systems import _plain, load_system
from thresher.retrieval.questions import Question
from thresher.rewards.reward import RewardInput, RewardResult, Source, TextSegment

SMALL: dict[str, Any] = {"questions_per_step": 2, "group_size": 4, "max_turn_tokens": 6, "max_context": 128}


def attempt_of(text: str = "one two<|im_end|>", **metadata: Any) -> RewardInput:
    pieces = [TextSegment(Source.PROMPT, b"Q"), TextSegment(Source.POLICY, text.encode())]
    return RewardInput(pieces=pieces, golds=("gold",), question="Who?", metadata=metadata)


def reward_of(*functions: Any, weights: tuple[float, ...] | None = None) -> Any:
    names = []
    for number, function in enumerate(functions):
        names.append(f"{_plain.IN_PROCESS}test_{number}")
        _plain.given[names[-1]] = function
    options: dict[str, Any] = {"rewards": names} | ({"weights": list(weights)} if weights else {})
    return load_system("plain", options).reward


def letters(text: str) -> float:
    """Return a reward of the text alone, from a file that another process can import."""
    return text.count("a") / 10


def test_a_reward_gets_what_its_parameters_ask_for() -> None:
    def whole(x: RewardInput) -> float:
        return len(x.golds)

    assert reward_of(lambda text: len(text))(attempt_of()).reward == len("one two")
    assert reward_of(whole)(attempt_of()).reward == 1
    assert reward_of(lambda attempt: len(attempt.pieces))(attempt_of()).reward == 2
    found = reward_of(lambda text, question, golds, level, missing=3: (question, golds, level, missing) and level)
    assert found(attempt_of(level=7)).reward == 7
    assert reward_of(lambda text, **columns: len(columns))(attempt_of(level=7, more=1)).reward == 6
    with pytest.raises(UserError, match=r"it takes level, which the question 'Who\?' does not have; its keys are"):
        found(attempt_of())
    with pytest.raises(UserError, match="expected a first parameter for the text"):
        reward_of(lambda *, question: 1.0)


def test_rewards_are_added_up_and_their_parts_kept() -> None:
    def judged(text: str) -> RewardResult:
        return RewardResult(0.5, {"em": True, "f1": 0.25}, "two")

    alone = reward_of(judged)(attempt_of())
    assert (alone.reward, alone.parts, alone.answer) == (0.5, {"em": True, "f1": 0.25}, "two")
    both = reward_of(judged, lambda text: True, weights=(2.0, -0.5))(attempt_of())
    assert both.reward == 0.5 and both.answer == "two"
    assert both.parts == {"em": True, "f1": 0.25, "test_0": 0.5, "test_1": 1.0}
    for wrong in (float("nan"), "high", None, 1e300):
        with pytest.raises(UserError, match="expected a finite number"):
            reward_of(lambda text, wrong=wrong: wrong)(attempt_of())
    finer = RewardResult(1.0, turns=[1.0, 2.0], tokens=[(0, 3, 4.0)])
    found = reward_of(lambda text: finer, lambda text: finer, judged, weights=(2.0, 0.5, 1.0))(attempt_of())
    assert found.turns == [2.5, 5.0] and found.tokens == [(0, 3, 8.0), (0, 3, 2.0)]
    assert reward_of(judged)(attempt_of()).turns is None
    with pytest.raises(UserError, match="they have different numbers of turns"):
        reward_of(lambda text: finer, lambda text: RewardResult(1.0, turns=[1.0]))(attempt_of())
    with pytest.raises(UserError, match="2 rewards have 1 weights"):
        reward_of(judged, judged, weights=(1.0,))


class Scorer:
    """A reward with its own state."""

    def __call__(self, text: str) -> float:
        return len(text)

    def half(self, text: str) -> float:
        return len(text) / 2


async def waits(text: str) -> float:
    return 1.0


def in_trl(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def test_whatever_can_be_called_is_a_reward() -> None:
    numbers = [lambda text: np.float32(3), lambda text: torch.tensor(4.0)]
    given: list[Any] = [Scorer(), Scorer().half, partial(lambda text, k: k, k=5), *numbers, len]
    assert [reward_of(one)(attempt_of()).reward for one in given] == [7, 3.5, 5, 3, 4, 7]
    judged = reward_of(lambda text: RewardResult(1, {"em": np.float32(0.5), "f1": None, "ok": True}))(attempt_of())
    assert dict(judged.parts) == {"em": 0.5, "f1": None, "ok": True}


def test_a_reward_that_is_none_ends_in_a_sentence() -> None:
    def fails(text: str) -> float:
        raise KeyError("level")

    for wrong, why in (
        (waits, "it is an async function"),
        (in_trl, "its first parameter is completions, a list in TRL; here a function gets one text"),
        (max, "its parameters cannot be read"),
        (Scorer, "expected a first parameter for the text"),
        (fails, r"raised KeyError \('level'\) at line \d+; fix the function"),
        (lambda text: [1.0] * 99, r"returned \[1.0, .{,80}\.\.\.; expected .* for the one text that it gets"),
        (lambda text: RewardResult(1, {"em": "yes"}), "the part 'em' = 'yes'; expected a finite number or None"),
        (lambda text: RewardResult(1, 3), "expected a dict of parts"),  # type: ignore[arg-type]
    ):
        with pytest.raises(UserError, match=why) as raised:
            reward_of(wrong)(attempt_of())
        assert "\n" not in str(raised.value)


def test_a_run_is_one_of_any_recipe(tiny_model_folder: Path, tmp_path: Path) -> None:
    questions = [{"question": f"Say {n}", "level": n % 2} for n in range(4)]
    trainer = GRPO(
        tiny_model_folder,
        lambda text, level: text.count("e") * level,
        questions=questions,
        dev=[Question("d", "Say more", (), {"level": 1})],
        out=tmp_path / "run",
        steps=2,
        lr=1e-3,
        run={"save_every": 1, "eval_every": 1},
        **SMALL,
    )
    summary = trainer.train()
    assert summary["steps"] == 2 and "reward_before" in summary and summary["em_after"] is None
    assert best_checkpoint(tmp_path / "run").metric == "reward"
    recipe = trainer.recipe
    assert (recipe.optim.lr, recipe.rollout.group_size, recipe.run.save_every) == (1e-3, 4, 1)
    records = stored(tmp_path / "run" / "trajectories" / "step_000001.jsonl")
    assert {record["metadata"]["level"] for record in records} <= {0, 1}
    for record in records:
        text = b"".join(bytes(s["text"], "utf-8") for s in record["segments"] if s["source"] == "policy").decode()
        if "\ufffd" not in text:
            assert record["reward"] == text.count("e") * record["metadata"]["level"]
    assert "em" not in json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[1])
    with pytest.raises(UserError, match="exists"):
        trainer.train()
    assert trainer.train(resume=True)["steps"] == 2
    # Its functions belong to this process. Another process can report on the run, but not resume it, and is told why.
    name = recipe.need(type(recipe.system)).options["rewards"][0]  # type: ignore[arg-type]
    del _plain.given[name]
    with pytest.raises(UserError, match="was a function of the program that trained, and is in no file"):
        load_system("plain", {"rewards": [name]}).reward(attempt_of())
    assert RunFolder.existing(tmp_path / "run").path == tmp_path / "run"


def test_a_function_of_a_file_is_named_by_it(tiny_model_folder: Path, tmp_path: Path) -> None:
    trainer = GRPO(tiny_model_folder, letters, prompts=["Say a"], out=tmp_path / "run", steps=1, **SMALL)
    assert trainer.recipe.system is not None
    assert trainer.recipe.system.options["rewards"] == [f"{inspect.getsourcefile(letters)}:letters"]
    own = tmp_path / "own.py"
    own.write_text("def two(text):\n    return 2\n")
    given = GRPO(tiny_model_folder, f"{own}:two", prompts=["Say a"], out=tmp_path / "other", steps=1, **SMALL)
    assert load_system("plain", given.recipe.system.options).reward(attempt_of()).reward == 2  # type: ignore[union-attr]


def test_the_function_itself_is_called(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name stands for a file only if that file's module is imported and holds this very object."""

    def name_of(reward: Any) -> str:
        made = GRPO(tiny_model_folder, reward, prompts=["Say a"], out=tmp_path / "run", steps=1, **SMALL)
        assert made.recipe.system is not None
        return str(made.recipe.system.options["rewards"][0])

    @wraps(letters)
    def doubled(text: str) -> float:
        return 2 * letters(text)

    assert name_of(doubled).startswith("python:letters")  # not the file's function, which it wraps
    assert name_of(partial(letters)).startswith("python:letters")
    scorer = Scorer()
    assert name_of(scorer.half) == name_of(scorer.half)  # a new object each time, but the same reward
    # A script that calls GRPO is not imported again for its reward.
    script = "import sys\ndef score(text):\n    return 1\nNAME = name_of(score)\n"
    (tmp_path / "script.py").write_text(script)
    assert runpy.run_path(str(tmp_path / "script.py"), {"name_of": name_of})["NAME"].startswith("python:score")
    # Values that a program changed in its module are used, and imports within a package work.
    package = tmp_path / "rewards_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "base.py").write_text("value = 1\n")
    (package / "one.py").write_text("from . import base\n\ndef score(text):\n    return base.value\n")
    monkeypatch.syspath_prepend(tmp_path)
    one = importlib.import_module("rewards_of_mine.one")
    named = name_of(one.score)
    assert named == "python:score"  # its file cannot be imported without the package
    (package / "two.py").write_text("def score(text):\n    return 2\n")
    two = importlib.import_module("rewards_of_mine.two")
    assert name_of(two.score) == f"{package / 'two.py'}:score"
    assert name_of(one.score) == named
    one.base.value = 5
    assert load_system("plain", {"rewards": [named]}).reward(attempt_of()).reward == 5


def test_a_function_that_is_defined_again_has_its_name_and_a_run_its_function(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the cell of a notebook is run again; and two runs of one program may have functions of one name."""

    def make(value: float) -> GRPO:
        def score(text: str) -> float:
            return value

        return GRPO(tiny_model_folder, score, prompts=["Say a"], out=tmp_path / "run", steps=1, **SMALL)

    one, two = make(1.0), make(2.0)
    assert one.recipe.differences(two.recipe) == []
    called: list[float] = []

    def train(recipe: Recipe, *_: Any) -> dict[str, Any]:
        system = load_system("plain", recipe.need(SystemSection).options)
        called.append(system.reward(attempt_of()).reward)
        return {}

    monkeypatch.setattr(grpo_module, "train", train)
    for trainer in (one, two, one):
        trainer.train()
    assert called == [1.0, 2.0, 1.0]


def test_signals_end_a_run_as_they_end_the_command(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(grpo_module, "train", lambda *_: seen.append(signal.getsignal(signal.SIGTERM)))
    before = signal.getsignal(signal.SIGTERM)
    GRPO(tiny_model_folder, letters, prompts=["Say a"], out=tmp_path / "run", steps=1, **SMALL).train()
    assert seen == [signals._on_signal] and signal.getsignal(signal.SIGTERM) is before


def test_what_is_refused(tiny_model_folder: Path, tmp_path: Path) -> None:
    def make(reward: Any = letters, **keys: Any) -> GRPO:
        return GRPO(tiny_model_folder, reward, **{"prompts": ["Say a"], "out": tmp_path / "run"} | keys)

    for keys, why in (
        ({"reward": None}, "expected either reward, a function, or system"),
        ({"system": "search_r1"}, "expected either reward, a function, or system"),
        ({"questions": ["Say a"]}, "expected either prompts, texts, or questions"),
        ({"prompts": []}, "there are no train questions"),
        ({"prompts": [3]}, "question 0 is int; expected a text, or a record"),
        ({"reward": 3}, "a reward is int; expected a function"),
        ({"reward": ["nowhere.py:f"]}, "reward: nowhere.py: no such file; give FILE.py:FUNCTION"),
        ({"share_prefix": False}, r"share_prefix is a key of rollout and optim; write rollout=\{'share_prefix': ..\}"),
        ({"stepps": 3}, "stepps is not a key of a recipe"),
        ({"num_generations": 3}, "TRL's num_generations is group_size here"),
        ({"prompts": "Say a"}, "prompts is one text; give a list"),
        (
            {"prompts": None, "questions": [{"prompt": "Say a"}]},
            "has no text under the key question; its keys are prompt",
        ),
        ({"prompts": None, "questions": [{"question": "a", "x": {1}}]}, "cannot be written as JSON"),
        ({"weights": 2.0}, "weights is 2.0; expected a list with a number for each reward"),
        ({"weights": ["a"]}, "expected a list with a number for each reward"),
        ({"reward": None, "system": "r1", "weights": [1.0]}, "weights belong to rewards"),
        ({"lr": -1.0}, "lr: expected a number >= 0"),
    ):
        reward = keys.pop("reward", letters)
        with pytest.raises(UserError, match=why):
            make(reward, **keys)


def test_keys_are_those_of_the_section_that_training_means(tiny_model_folder: Path, tmp_path: Path) -> None:
    def made(reward: Any = letters, **keys: Any) -> Any:
        return GRPO(tiny_model_folder, reward, prompts=["Say a"], out=tmp_path / "run", **keys).recipe

    recipe = made(device="cpu", prompt="raw", dtype="bfloat16", seed=7, lora={"rank": 2}, template="{question}!")
    assert (recipe.model.device, recipe.model.prompt, recipe.model.dtype, recipe.run.seed) == (
        "cpu",
        "raw",
        "bfloat16",
        7,
    )
    assert recipe.lora.rank == 2 and recipe.system.template == "{question}!" and recipe.system.options["rewards"]
    assert made(rank=3).lora.rank == 3 and made(**{"model.device": "cpu"}).model.device == "cpu"
    options = {"evaluation_reward": False}
    recipe = made(None, system="eval_rar", options=options, url="http://localhost:1")
    assert recipe.system.options == options and recipe.retrieval.url == "http://localhost:1"


@pytest.mark.slow
def test_a_run_of_a_files_function_goes_on_from_the_command_line(
    tiny_model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its recipe is an ordinary one, so it is evaluated and resumed. A function without a file is refused."""
    own = tmp_path / "own.py"
    own.write_text("def words(text):\n    return len(text.split())\n")
    for name, reward in (("file", f"{own}:words"), ("lambda", lambda text: 1.0)):
        out = tmp_path / name
        questions = [{"question": "Say a", "answer": "a"}, {"question": "Say b", "answer": "b"}]
        keys = {"dev": questions, "steps": 1, "save_every": 1, **SMALL}
        GRPO(tiny_model_folder, reward, questions=questions, out=out, **keys).train()
        for key in [key for key in _plain.given if key.startswith(_plain.IN_PROCESS)]:
            del _plain.given[key]  # as in another process
        again = run(["train", str(out / "recipe.toml"), "--out", str(out), "--resume", "--set", "run.steps=2"])
        measured = run(["eval", str(out / "recipe.toml"), "--out", str(tmp_path / f"{name}-eval")])
        assert run(["report", str(out)]) == 0
        said = capsys.readouterr().err
        assert (again, measured) == ((0, 0) if name == "file" else (2, 2)), said
        assert ("was a function of the program that trained, and is in no file" in said) == (name == "lambda")
