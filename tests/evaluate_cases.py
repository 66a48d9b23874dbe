"""Shared by the tests of `thresher eval`: question files, flags that lack only --out, and its error messages."""

import json
from pathlib import Path

import pytest

from thresher.cli import main as cli
from thresher.cli.commands.answering import Eval
from thresher.engine.config.recipe import Recipe
from thresher.retrieval.questions import Question, question_record

SHORT = ("--set", "rollout.max_turn_tokens=40", "--set", "rollout.max_context=900")
PROMPT = "<search> or <answer>: {question}\n"  # the tiny policy was taught to continue it
# The text that `script` forces for the seven questions, whose seeds are their numbers: two, one or no searches.
SEARCHES = ("<search>teacher of Anna Bell</search>", "<search>Carl Dorn</search>")
SAID = {number: [*SEARCHES[: number % 3], "<answer>Mia Noor</answer>"] for number in range(7)}


def write_asked(folder: Path, questions: list[Question]) -> Path:
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(question_record(question)) + "\n" for question in questions[:7]))
    return path


def searching_flags(model: Path, index: Path, asked: Path) -> list[str]:
    """Return the flags of an evaluation that lack only --out, of a policy that sometimes searches and answers."""
    template = asked.with_name("prompt.txt")
    template.write_text(PROMPT)
    flags = ["--model", str(model), "--index", str(index), "--k", "2"]
    prompt = ["--set", f"system.template={template}", "--set", "rollout.max_policy_tokens=80"]
    return ["eval", *flags, "--system", "search_r1", "--questions", str(asked), *SHORT, *prompt]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert cli.run(list(arguments)) == 2
    error = capsys.readouterr().err
    assert error.startswith("thresher: ") and error.count("\n") == 1
    return error


def recipe_from(*arguments: str) -> Recipe:
    command = Eval.of(cli.build_parser().parse_args(["eval", *arguments, "--out", "o"]))
    recipe: Recipe = command.run_recipe()[0]
    return recipe
