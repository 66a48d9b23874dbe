"""A run's questions, their passages and seeds; what does not fit is refused before there is a folder."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from train_cases import GROUPS, NAMES, SAMPLES, Make, metrics, sampled

from thresher.common.errors import UserError
from thresher.engine.assemble import load_questions, load_run_context
from thresher.engine.protocol.prompts import PromptBatch
from thresher.engine.rollout.rollout import Job, seed_of
from thresher.engine.scoring.score import Judges
from thresher.engine.systems import load_system
from thresher.engine.training.step import GrpoStep, questions_of_step
from thresher.engine.training.train import train
from thresher.retrieval.questions import Question

PASSAGES = [{"title": "", "text": f"{name} is the mayor. " * 8} for name in NAMES[:2]]


def write_questions(path: Path, *changes: dict[str, Any]) -> str:
    """Write a question with two long passages for each of these changes; return the file's name."""
    asked = {"question": "Who?", "golden_answers": NAMES[:1], "passages": PASSAGES}
    lines = [asked | {"id": str(number)} | change for number, change in enumerate(changes)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_questions_of_a_step_come_once_in_every_pass() -> None:
    questions = [Question(str(number), "?", ("a",)) for number in range(10)]
    asked = [q.id for step in range(1, 11) for q in questions_of_step(questions, 4, 7, step)]
    passes = [asked[at : at + 10] for at in range(0, 40, 10)]
    assert all(sorted(part) == sorted(q.id for q in questions) for part in passes)
    assert len({tuple(part) for part in passes}) == 4  # each in its own order
    again = [q.id for q in questions_of_step(questions, 4, 7, 3)]
    assert again == asked[8:12] != [q.id for q in questions_of_step(questions, 4, 8, 3)]
    assert [q.id for q in questions_of_step(questions[:2], 5, 0, 1)].count("0") in (2, 3)


def test_seeds_are_the_same_on_every_machine() -> None:
    assert seed_of(0, 1, 2, 3) == 3252311618909706447
    assert len({seed_of(*parts) for parts in ((1, 2), (2, 1), (12,), ("1", 2), (1, 2, 0))}) == 5
    assert all(0 <= seed_of(number) < 2**63 for number in range(100))


class Sampled(Exception):
    """Raised where a step's rollout would begin, to end the step."""


def test_the_noise_of_a_sample_is_that_of_the_runs_seed_the_step_the_group_and_the_sample(make_recipe: Make) -> None:
    jobs: list[Job] = []

    def run(given: list[Job], _: float, shape: None = None) -> None:
        jobs.extend(given)
        raise Sampled

    rollout: Any = SimpleNamespace(run=run, retrieve_and_truncate=lambda asked: PromptBatch(list(asked), 0, 0, 0))
    questions = [Question("q", "Who?", ("a",))]  # the same in every group of every step
    for seed in (0, 1):
        context, updater = load_run_context(make_recipe(run={"seed": seed})), SimpleNamespace()
        step = GrpoStep(context=context, questions=questions, rollout=rollout, judges=Judges(), updater=updater)  # type: ignore[arg-type]
        for number in (1, 2, 3):
            with pytest.raises(Sampled):
                step(number)
    places = itertools.product((0, 1), (1, 2, 3), range(GROUPS), range(SAMPLES))
    assert [(job.group, job.sample) for job in jobs] == [*itertools.product(range(GROUPS), range(SAMPLES))] * 6
    assert [job.seed for job in jobs] == [seed_of(*place) for place in places]
    assert len({job.seed for job in jobs}) == len(jobs) == 6 * GROUPS * SAMPLES


@pytest.mark.parametrize("name", ["train", "dev"])
def test_a_prompt_that_does_not_fit_is_refused_before_there_is_a_folder(
    tmp_path: Path, make_recipe: Make, name: str
) -> None:
    file = write_questions(tmp_path / "questions.jsonl", {}, {"id": "long", "question": "Who knows " * 200 + "?"})
    with pytest.raises(UserError, match=r"question long: its prompt of .* a context of 240"):
        train(make_recipe(data={name: file}), tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["questions.jsonl"]


def test_arena_is_not_trained_where_no_question_knows_its_gold_passages(
    tmp_path: Path, make_recipe: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompt.txt").write_text("{question} {passages}\n")
    arena = {"name": "arena", "template": str(tmp_path / "prompt.txt")}
    none = write_questions(tmp_path / "none.jsonl", {}, {})
    some = write_questions(tmp_path / "some.jsonl", {}, {"gold_indices": [1]}, {"gold_indices": []})
    with pytest.raises(UserError, match=r"none.jsonl: no question says .* arena .* give questions with passages and"):
        train(make_recipe(system=arena, data={"train": none, "dev": None}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    # The same reward on the same questions, but for a system that does not need gold passages.
    load_questions(make_recipe(data={"train": none, "dev": none}), load_system("naive_grpo", {}))
    assert capsys.readouterr().out == ""
    recipe = make_recipe(system=arena, data={"train": some, "dev": none})
    assert [len(questions) for questions in load_questions(recipe, load_system("arena", {}))] == [3, 2]
    first, second = capsys.readouterr().out.splitlines()
    assert f"{some}: 1 of 3 questions do not say" in first and f"{none}: 2 of 2 questions do not say" in second


def test_cut_passages_are_reported_once_counted_and_stored_as_shown(
    tmp_path: Path, make_recipe: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompt.txt").write_text("{question} {passages}\n")
    file = write_questions(tmp_path / "q.jsonl", {}, {})
    recipe = make_recipe(
        system={"name": "naive_grpo", "template": str(tmp_path / "prompt.txt")},
        data={"train": file, "dev": file},
        rollout={"questions_per_step": 1, "group_size": 2},
        run={"steps": 2, "eval_every": None},
    )
    train(recipe, tmp_path / "run")
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("raise rollout.max_passage_tokens") == 1
    assert "train: 2 of 2 questions had passages cut to 40 tokens" in printed  # from the first evaluation
    assert [record.get("eval", record)["cut_passages"] for record in metrics(tmp_path / "run")] == [4, 2, 2, 4]
    for entry in sampled(tmp_path / "run", 1):
        texts = [passage["text"] for passage in entry["passages"]]
        assert entry["segments"][0]["text"] == f"Who? {texts[0]}\n{texts[1]}\n"
        assert all(whole["text"].startswith(text) for whole, text in zip(PASSAGES, texts, strict=True))
