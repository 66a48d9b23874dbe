"""Simulated searches: the curriculum of noise, requests to the chat model, and runs of ZeroSearch, which draw the same
noise again and repeat from their records."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer
from rollout_cases import Written
from stored_cases import stored
from train_cases import PREFILLS, Make, assert_same_run, metrics, steps_of, train_killed

from thresher.common.errors import UserError
from thresher.engine.config.recipe import Recipe, make_recipe
from thresher.engine.config.sections import ToolSection
from thresher.engine.episode import Result, Tool
from thresher.engine.protocol.trajectory import Trajectory
from thresher.engine.rollout.simulated_search import TEMPLATE, Curriculum, search_prompt
from thresher.engine.rollout.tools import Toolbox, load_tools
from thresher.engine.systems import load_system
from thresher.engine.training.train import train
from thresher.retrieval.questions import Question
from thresher.rewards.reward import Source

QUESTION = Question("q", "Who founded Drell Zamoth?", ("Anna Bell", "A. Bell"))


def curriculum(**changes: Any) -> Curriculum:
    return replace(Curriculum(start=0.0, end=0.5, base=4.0, steps=203, seed=0), **changes)


def test_the_curriculum() -> None:
    for made in (curriculum(), curriculum(start=0.25, end=0.75), curriculum(base=1.0), curriculum(start=0.9, end=0.1)):
        assert made.probability(None) == made.probability(203) == made.probability(300) == made.end
        for step in range(1, 204):
            share = step / 203
            risen = share if made.base == 1 else (made.base**share - 1) / (made.base - 1)
            expected = made.start + risen * (made.end - made.start)
            assert math.isclose(made.probability(step), expected, rel_tol=1e-13)
    # sqrt(4) - 1 is a third of 4 - 1: halfway through, the noise has risen by a third.
    assert math.isclose(curriculum(steps=2).probability(1), 0.5 / 3, rel_tol=1e-15)


def test_noise_is_a_function_of_its_call() -> None:
    made = curriculum(steps=1)

    def draws(made: Curriculum, step: int = 1) -> list[bool]:
        return [made.noisy(step, f"q{q}", sample, call) for q in range(50) for sample in range(8) for call in range(5)]

    drawn = draws(made)
    assert drawn == draws(made) and drawn != draws(replace(made, seed=1)) and drawn != draws(replace(made, steps=9))
    assert abs(sum(drawn) - 1000) < 4 * math.sqrt(2000 / 4)  # four standard deviations; the draws are fixed
    by_place = [[made.noisy(1, "q", n if part == 0 else 0, n if part else 0) for n in range(64)] for part in (0, 1)]
    assert all(0 < sum(part) < 64 for part in by_place)
    assert not any(draws(curriculum(end=0.0))) and all(draws(curriculum(start=1.0, end=1.0)))


def test_a_prompt_is_filled_in_one_pass() -> None:
    filled = search_prompt("{quality} {query} {question} {answer} {other}", "{answer}", "{query}?", ("A", "B"), True)
    assert filled == "noisy {answer} {query}? A {other}"
    assert "is: not known\nThe documents must be useful." in search_prompt(TEMPLATE, "x", "y", (), False)


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with ChatServer() as chat:
        yield chat


def asked(box: Toolbox, *queries: Any, step: int | None = None) -> list[Result]:
    box.step = step
    calls = [box.call(n, Trajectory("q", 0, n), Tool("search", {"query": q}), QUESTION) for n, q in enumerate(queries)]
    while box.waiting:
        box.ended(wait=True)
    return [call.result or Result("none") for call in calls]


def chat_tool(server: ChatServer, **keys: Any) -> Toolbox:
    section = ToolSection(chat_url=server.url, model="big", concurrency=1, timeout=30.0, **keys)
    said: list[str] = []
    box = load_tools({"search": section}, None, said.append)
    assert said == [f"calls to the tool search go to {server.url}"]
    return box


def test_a_chat_model_writes_what_a_search_finds(server: ChatServer, tmp_path: Path) -> None:
    server.script = ["Doc 1: a\n\n  Doc 2: b \n", " \n", (200, {"choices": []}), (503, {}), "half"]
    results = asked(chat_tool(server, max_tokens=77), "founder of Drell Zamoth", *"bcde", 3)
    assert [(result.text, result.error) for result in results] == [
        ("Doc 1: a\nDoc 2: b", False),
        ("search failed: its chat model wrote nothing.", True),
        ("search failed: its chat model wrote nothing.", True),
        ("search failed: its server gave status 503.", True),
        ("search failed: its server gave a connection that broke.", True),
        ("search failed: it was called without a query.", True),
    ]
    assert server.paths[0] == "/v1/chat/completions"
    (message,) = server.asked[0].pop("messages")
    assert server.asked[0] == {"model": "big", "temperature": 0.8, "max_tokens": 77}
    for part in ("Who founded Drell Zamoth?", "is: Anna Bell\n", "must be useful.", "Query: founder of Drell Zamoth\n"):
        assert part in message["content"]
    template = tmp_path / "prompt.txt"
    template.write_text("{quality}: {query}")
    server.reply = lambda content: content
    assert asked(chat_tool(server, noise=(1.0, 0.0), template=str(template)), "x")[0].text == "useful: x"
    assert asked(chat_tool(server, noise=(0.0, 1.0), template=str(template)), "x")[0].text == "noisy: x"
    half = asked(chat_tool(server, noise=(1.0, 1.0), template=str(template)), "x", "y", step=1)
    assert [one.text for one in half] == ["noisy: x", "noisy: y"]
    template.write_text("{query}")
    with pytest.raises(UserError, match=r"prompt.txt: the prompt of a simulated search has no \{quality\}; it needs"):
        chat_tool(server, template=str(template))


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({}, "function: expected one of function, FILE.py:FUNCTION, or url, a server, or chat_url, .* got none"),
        ({"url": "u", "chat_url": "v", "model": "m"}, "function: expected one of .*, got url and chat_url"),
        ({"chat_url": "v"}, "model: expected the chat model's name with chat_url"),
        ({"url": "u", "model": "m"}, "model: expected .* and none without"),
        ({"url": "u", "template": "t"}, "template: expected none without chat_url"),
        ({"url": "u", "noise": [0.0, 1.5]}, r"noise: .*1\.5"),
        ({"url": "u", "noise": [0.0]}, "noise: "),
        ({"url": "u", "noise_base": 0.5}, "noise_base: expected a number >= 1"),
    ],
)
def test_sections_that_are_refused(section: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=rf"r\.toml: \[tools\.search\] {problem}"):
        make_recipe({"model": {"path": "m"}, "tools": {"search": section}}, "r.toml")


# --- Runs


STAND_IN = """
def search(query, noisy, question, golds):
    return f"{query} is {'Nobody' if noisy else golds[0]}, of {len(golds)}."
"""


# Two searches for each question, whatever the policy writes.
SEARCHING = """
from dataclasses import dataclass, replace

from thresher.engine.episode import Generate, Prompt, Retrieved, Tool
from thresher.engine.systems import load_system


@dataclass(frozen=True)
class Options:
    pass


def episode(question, config):
    yield Prompt(config.template, question.question)
    for query in ("spouse", "mayor"):
        result = yield Tool("search", {"query": query})
        yield Retrieved(result.text, "<information>", "</information>")
        yield Generate(stop=("</answer>",), max_tokens=12)
    return "answered"


def system(options):
    return replace(load_system("zero_search", {}), name="searching", episode=episode)
"""


@pytest.fixture
def recipe(make_recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recipe]:
    monkeypatch.chdir(tmp_path)
    Path("search.py").write_text(STAND_IN)
    Path("searching.py").write_text(SEARCHING)

    def make(**changes: Any) -> Recipe:
        tool = {"function": "search.py:search", "max_tokens": 24, "noise": [0.0, 1.0]} | changes.pop("tool", {})
        rollout = {"max_passage_tokens": 30, **changes.pop("rollout", {})}
        return make_recipe(system={"name": "./searching.py"}, tools={"search": tool}, rollout=rollout, **changes)

    return make


def calls_of(run: str, step: int, folder: str = "trajectories") -> list[dict[str, Any]]:
    path = Path(run, folder, f"step_{step:06d}.jsonl")
    return [call for entry in stored(path) for call in entry.get("tools", [])]


@pytest.mark.slow
def test_a_run_draws_its_noise_again_and_repeats_from_its_record(recipe: Callable[..., Recipe]) -> None:
    train(recipe(), "run")
    drawn = {step: calls_of("run", step) for step in (1, 2, 3, 4)}
    for step, calls in drawn.items():
        assert len(calls) == 24 and not any(call["error"] for call in calls)
        for call in calls:
            assert ("Nobody" if call["noisy"] else "Anna Bell, of 4") in call["text"] and [*call["arguments"]] == [
                "query"
            ]
        (record,) = [record for record in steps_of(Path("run")) if record["step"] == step]
        assert record["tool_calls"] == len(calls) and record["noisy_tool_calls"] == sum(c["noisy"] for c in calls)
    noisy = [sum(call["noisy"] for call in calls) / len(calls) for calls in drawn.values()]
    assert noisy[0] < noisy[-1] == 1.0
    # An evaluation always uses the end of the curriculum.
    assert all(call["noisy"] for step in (0, 2, 4) for call in calls_of("run", step, "evaluations"))
    train_killed(recipe(), Path("killed"), 3)
    train(recipe(), "killed", resume=True)
    assert_same_run(Path("run"), Path("killed"), but=PREFILLS)
    Path("search.py").write_text(STAND_IN.replace("return", "raise SystemExit; return"))
    train(recipe(rollout={"tools_replay": "run"}), "again")
    assert {step: calls_of("again", step) for step in drawn} == drawn
    assert [one["reward"] for one in steps_of(Path("again"))] == [one["reward"] for one in steps_of(Path("run"))]
    # The curriculum is spread over run.steps.
    Path("search.py").write_text(STAND_IN)
    with pytest.raises(UserError, match=r"run\.steps is 4, not 6"):
        train(recipe(run={"steps": 6}), "run", resume=True)
    flat = [recipe(tool={"noise": [0.5, 0.5]}, run={"steps": steps}).digest() for steps in (4, 6)]
    assert flat[0] == flat[1] and metrics(Path("run"))


@pytest.mark.slow
def test_noise_is_that_of_the_step_of_its_question(recipe: Callable[..., Recipe]) -> None:
    """A call of a group that outlives its rollout has the noise of the group's own step."""
    partial = {"partial": True, "max_num_seqs": 4}
    train(recipe(tool={"noise": [0.0, 1.0], "noise_base": 1.0}, run={"steps": 2}, rollout=partial), "run")
    assert [{call["noisy"] for call in calls_of("run", step)} for step in (1, 2)] == [{False, True}, {True}]


def test_the_episode_is_search_r1s_with_a_tool(
    written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    system = load_system("zero_search", {})
    Path("search.py").write_text(STAND_IN)
    box = load_tools({"search": ToolSection(function="search.py:search", noise=(0.0, 0.0))}, None, lambda _: None)
    turns = ["<search> founder </search>", "<answer>Anna</answer>"]
    run, trajectory = written(turns, system, QUESTION, tools=box, max_passage_tokens=60)
    sources = [segment.source for segment in trajectory.segments[1:]]
    assert sources == [Source.POLICY, Source.RETRIEVED, Source.POLICY]
    shown = run.tokenizer.decode(trajectory.segments[2].ids)
    assert shown == "\n\n<information>founder is Anna Bell, of 2.</information>\n\n"
    assert not system.needs_index and trajectory.reason == "answered"
    (call,) = trajectory.tools
    assert json.dumps(call) == json.dumps(
        {"name": "search", "arguments": {"query": "founder"}, "text": "founder is Anna Bell, of 2.", "error": False}
        | {"noisy": False}
    )
