"""A training run that depends on other processes: a retriever's server that is killed, a judge that fails. No learned
step is lost, and the run resumes with the same bits."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
from chat_server import ChatServer
from rollout_cases import EOS
from stored_cases import stored
from train_cases import GROUPS, SAMPLES, Make, assert_same_run, metrics, steps_of, steps_saved, what_happened

from thresher.common.errors import UserError
from thresher.engine.assemble import load_retrieval
from thresher.engine.config.sections import JudgeSection
from thresher.engine.rollout.rollout import seed_of
from thresher.engine.systems import load_system
from thresher.engine.training import step as step_module
from thresher.engine.training import train as train_module
from thresher.engine.training.train import Progress, train
from thresher.retrieval.retriever import Unanswered
from thresher.retrieval.serving.client import RemoteRetriever


class IndexServer:
    """A process that serves an index at a URL, and can be killed and restarted at the same address."""

    def __init__(self, index: Path) -> None:
        self.index, self.port = index, 0
        self.start()

    def start(self) -> None:
        arguments = ["serve-retriever", "--index", str(self.index), "--port", str(self.port)]
        command = [sys.executable, "-P", "-m", "thresher.cli", *arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        found = re.search(r" at (http://127\.0\.0\.1:(\d+))", self.process.stdout.readline())
        assert found
        self.url, self.port = found[1], int(found[2])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def index_server(tiny_index_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[IndexServer]:
    """Start a server that is asked for everything: so small a run would soon have all answers in its cache."""
    monkeypatch.setattr("thresher.retrieval.retriever.CACHE_CHARACTERS", -1)
    server = IndexServer(tiny_index_folder)
    yield server
    server.kill()


def at_call(patch: pytest.MonkeyPatch, owner: Any, name: str, at: int, do: Callable[[], object]) -> list[int]:
    """Call `do` once, before call number `at` of the function; return a list that holds the number of calls."""
    function, calls = getattr(owner, name), [0]

    def counted(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            do()
        return function(*arguments, **options)

    patch.setattr(owner, name, counted)
    return calls


def assert_same_but_for_the_recipe(one: Path, other: Path) -> None:
    first, second = what_happened(one), what_happened(other)
    assert first.keys() == second.keys()
    assert [key for key in first if first[key] != second[key]] == ["recipe"]


@pytest.mark.slow
def test_a_server_killed_in_the_middle_and_started_again_costs_no_trajectory(
    tmp_path: Path,
    make_recipe: Make,
    tiny_model_folder: Path,
    index_server: IndexServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The policy searches at every turn, and the server is away for a second in the middle of a step. The run equals
    one with the index in this process, to the bit."""
    (tmp_path / "prompt.txt").write_text("<search> or <answer>: {question}\n")
    changes: dict[str, dict[str, Any]] = {
        "model": {"path": str(tiny_model_folder)},
        "system": {"template": str(tmp_path / "prompt.txt")},
        "run": {"steps": 2, "eval_every": None},
    }

    def killed_for_a_second() -> None:
        index_server.kill()
        Timer(1.0, index_server.start).start()

    train(make_recipe(**changes), tmp_path / "index")
    searches = at_call(monkeypatch, RemoteRetriever, "_find", 9, killed_for_a_second)
    train(make_recipe(retrieval={"index": None, "url": index_server.url}, **changes), tmp_path / "url")
    assert index_server.process.poll() is None and searches[0] > 9
    assert max(record["search_seconds"] for record in steps_of(tmp_path / "url")) > 1
    assert_same_but_for_the_recipe(tmp_path / "index", tmp_path / "url")


@pytest.mark.slow
def test_a_server_that_stays_away_ends_the_run_and_costs_what_was_being_sampled(
    tmp_path: Path, make_recipe: Make, uninterrupted: Path, index_server: IndexServer
) -> None:
    """The server is gone in step 2, before the recipe's first checkpoint, and returns at another address."""
    out = tmp_path / "run"

    def watch(progress: Progress) -> None:
        if progress.step == 1:
            index_server.kill()

    with pytest.raises(Unanswered, match=r"no answer for 0.2 s .* start the server again, and continue"):
        train(make_recipe(retrieval={"index": None, "url": index_server.url, "patience": 0.2}), out, watch=watch)
    assert [(record["step"], "eval" in record) for record in metrics(out)] == [(0, True), (1, False)]
    assert steps_saved(out) == [1] and {path.stem for path in (out / "trajectories").iterdir()} == {"step_000001"}
    state = json.loads((out / "checkpoints" / "step_000001" / "state.json").read_text())
    assert re.fullmatch("[0-9a-f]{16}", state["state"]["index"])  # sent by the server
    index_server.port = 0
    index_server.start()
    train(make_recipe(retrieval={"index": None, "url": index_server.url}), out, resume=True)
    assert_same_but_for_the_recipe(uninterrupted, out)


# The smallest run that can be compared with another one.
SMALL: dict[str, dict[str, Any]] = {
    "rollout": {"questions_per_step": 1, "group_size": 2},
    "run": {"steps": 1, "eval_questions": 1},
}


@pytest.mark.parametrize("what", ["evaluation", "judge"])
def test_what_fails_for_want_of_others_is_made_up_for_and_costs_no_step_that_was_learned(
    tmp_path: Path, make_recipe: Make, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The failures come before the recipe's first checkpoint, in the evaluation of step 1 or while step 2 is judged."""

    def fail() -> None:
        raise UserError("http://judge: stayed away for 300 s")

    recipe, whole, out = make_recipe(), uninterrupted, tmp_path / "run"
    if what == "evaluation":
        recipe, whole = make_recipe(**SMALL), tmp_path / "whole"
        train(recipe, whole)
    owner, name = (train_module, "evaluate") if what == "evaluation" else (step_module, "score")
    at_call(monkeypatch, owner, name, 2, fail)
    with pytest.raises(UserError, match="stayed away"):
        train(recipe, out)
    assert [(record["step"], "eval" in record) for record in metrics(out)] == [(0, True), (1, False)]
    assert steps_saved(out) == [1]
    train(recipe, out, resume=True)
    assert_same_run(whole, out)


def test_a_run_is_not_resumed_with_another_index(
    tmp_path: Path, make_recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, out = make_recipe(**SMALL), tmp_path / "run"
    retriever = load_retrieval(recipe, load_system("eval_rar", {}))
    assert retriever is not None
    monkeypatch.setattr(train_module, "load_retrieval", lambda *_: retriever)
    retriever.identity = "one"
    train(recipe, out)
    before = what_happened(out)
    retriever.identity = "another"
    with pytest.raises(
        UserError, match=r"retrieval.url: the server has another index \(another\) than .* \(one\); start"
    ):
        train(recipe, out, resume=True)
    assert what_happened(out) == before


@pytest.mark.parametrize("accuracy", ["judge", "em"])
def test_a_chat_model_is_asked_where_its_verdict_is_rewarded(
    tmp_path: Path, make_recipe: Make, accuracy: str, script: Callable[..., None]
) -> None:
    """The first sample of every question writes an answer, the others none."""
    (tmp_path / "prompt.txt").write_text("{question} {passages}\n")
    asked = {"id": "1", "question": "Who?", "golden_answers": ["nobody"], "gold_indices": [1]}
    asked["passages"] = [{"title": "Anna", "text": "Anna is the mayor."}]
    (tmp_path / "questions.jsonl").write_text(json.dumps(asked) + "\n")
    arena = {"name": "arena", "template": str(tmp_path / "prompt.txt"), "options": {"accuracy": accuracy}}
    path = str(tmp_path / "questions.jsonl")
    recipe = make_recipe(system=arena, data={"train": path, "dev": path}, run={"steps": 1})
    samples = {seed_of(3, 1, group, sample): sample for group in range(GROUPS) for sample in range(SAMPLES)}
    evaluated = {0: [EOS] * 8}
    script({seed: ["<answer>Eva</answer>" if not sample else EOS] for seed, sample in samples.items()} | evaluated)
    out = tmp_path / "run"
    with ChatServer() as server:
        server.reply = lambda content: "yes"
        train(replace(recipe, judge=JudgeSection(url=server.url, model="m")), out)
        assert bool(server.asked) == (out / "replies.jsonl").exists() == (accuracy == "judge")
    entries = stored(out / "trajectories" / "step_000001.jsonl")
    assert [bool(entry["answer"]) for entry in entries] == [sample == 0 for sample in samples.values()]
    for entry in entries:
        assert entry.get("verdict") == (bool(entry["answer"]) if accuracy == "judge" else None)
        assert entry["parts"]["accuracy"] == (accuracy == "judge" and bool(entry["answer"]))
