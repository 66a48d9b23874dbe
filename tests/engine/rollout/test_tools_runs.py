"""Runs with tools, for every command that uses them: the example of docs/systems.md exactly as given there, training
and its replay, and recipes that name a tool wrongly."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rollout_cases import Written, system_of
from stored_cases import stored
from tool_cases import LOOKING
from train_cases import Make, metrics, what_happened

from thresher.cli import main as cli
from thresher.common.errors import UserError
from thresher.engine.assemble import make_prompt_context
from thresher.engine.config.recipe import Recipe, load_recipe, make_recipe
from thresher.engine.episode import EpisodeConfig, Generate, Prompt, Retrieved, Tool, Turn
from thresher.engine.evaluation.api_rollout import ApiRollout, Continued
from thresher.engine.planning.memory import read_setting
from thresher.engine.protocol.prompts import CUT_OFF, Renderer
from thresher.engine.protocol.trajectory import check_trajectory
from thresher.engine.rollout.rollout import Job, Limits
from thresher.engine.rollout.tools import HostedTool, Toolbox, load_tools
from thresher.engine.systems import load_system
from thresher.engine.training.train import train
from thresher.policy.tokenizer import Tokenizer, train_bpe
from thresher.retrieval.questions import Question
from thresher.rewards.reward import Source

DOCS = Path(__file__).resolve().parents[3] / "docs" / "systems.md"


@pytest.fixture
def recipe(make_recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recipe]:
    """Return a function that makes the recipe of a training run with the file above, in the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("looking.py").write_text(LOOKING)

    def make(**rollout: Any) -> Recipe:
        tools = {"look": {"function": "looking.py:look", "max_tokens": 20}}
        run = {"steps": 2, "eval_every": 1, "save_every": 1}
        system = {"name": "looking.py"}
        return make_recipe(system=system, tools=tools, rollout={"max_passage_tokens": 30, **rollout}, run=run)

    return make


def test_the_calculator_of_the_page(
    written: Written, tiny_tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = DOCS.read_text(encoding="utf-8")
    code, _ = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (piece,) = re.findall(r"^    \[system\]\n    name = \"sums.py\"\n.*?\n\n(?=\S)", text, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("sums.py").write_text(code, encoding="utf-8")
    Path("r.toml").write_text('[model]\npath = "m"\n' + re.sub("^    ", "", piece, flags=re.MULTILINE))
    recipe = load_recipe("r.toml")
    system = load_system("sums.py", {})
    turns = ["<call>17 * 23</call>", "<call>17 / 23</call>", "<call>1</call>", "<answer>391</answer>"]
    question = Question("q", "How much is 17 * 23?", ("391",))
    box = load_tools(recipe.tools, None, lambda _: None)
    run, trajectory = written(turns, system, question, tools=box, max_passage_tokens=60)
    assert check_trajectory(trajectory, tiny_tokenizer, system.tags, run.limits.max_context) == []
    assert trajectory.reason == "answered" and [call["error"] for call in trajectory.tools] == [False, True]
    assert trajectory.tools[0] == {
        "name": "calculator",
        "arguments": {"left": "17", "sign": "*", "right": "23"},
        "text": "391",
        "error": False,
    }
    assert trajectory.tools[1]["text"] == "calculator raised KeyError: '/'"
    shown = [tiny_tokenizer.decode(s.ids) for s in trajectory.segments if s.source is Source.RETRIEVED]
    assert shown == ["<result>391</result>\n", "<result>calculator raised KeyError: '/'</result>\n"]


def test_a_server_writes_the_turns_of_an_episode_with_tools() -> None:
    """Without a tokenizer lengths are in bytes, 4 of which count as a token of a limit."""

    class Scripted:
        def continued(self, asked: Any, temperature: float) -> list[Continued]:
            contexts.extend(context[-1]["content"] for context, _, _ in asked)
            return [Continued(Turn(texts.pop(0), "</call>"), full=False) for _ in asked]

    def episode(question: Question, config: EpisodeConfig) -> Any:
        yield Prompt("{question}", question.question)
        for _ in range(2):
            turn = yield Generate(("</call>",))
            result = yield Tool("echo", {"text": turn.inside("call")})
            yield Retrieved(result.text, "<result>", "</result>")
        return "done"

    def echo(arguments: dict[str, Any]) -> str:
        return str(arguments["text"]) * 20

    tokenizer, system = train_bpe((), 256), system_of(episode, ("<call>", "</call>", "<result>", "</result>"))
    renderer = Renderer(
        tokenizer=tokenizer, tags=system.tags, k=1, chat=False, max_passage_tokens=999, passage_format="{text}"
    )
    limits = Limits(max_turn_tokens=99, max_policy_tokens=999, max_context=999, max_num_seqs=1)
    box = Toolbox({"echo": HostedTool(name="echo", function=echo, max_tokens=10)})
    contexts: list[str] = []
    texts = [b"<call>a</call>", b"<call>bcd</call>"]
    rollout = ApiRollout(Scripted(), tokenizer, None, system, EpisodeConfig("", 1), renderer, limits, False, 4, box)
    (found,) = rollout.run([Job(Question("q", "Who?", ("Anna",)), 0, 0, 0)], 0.0)
    cut = ("bcd" * 20)[: 40 - len(CUT_OFF)] + CUT_OFF
    assert [call["text"] for call in found.tools] == ["a" * 20, cut]
    assert contexts == ["Who?", f"<result>{'a' * 20}</result>"] and found.reason == "done"


def test_training_repeats_from_its_record(recipe: Callable[..., Recipe]) -> None:
    train(recipe(), "run")
    steps = [record for record in metrics(Path("run")) if "eval" not in record]
    assert all(record["tool_calls"] > record["tool_errors"] > 0 for record in steps)
    calls = [call for entry in stored(Path("run/trajectories/step_000001.jsonl")) for call in entry.get("tools", [])]
    assert len(calls) == steps[0]["tool_calls"] and {call["name"] for call in calls} == {"look"}
    Path("looking.py").write_text(LOOKING.replace("number = next(COUNT)", "raise SystemExit"))
    train(recipe(tools_replay="run"), "again")
    first, second = what_happened(Path("run")), what_happened(Path("again"))
    assert first.keys() == second.keys()
    # Tokens, log-probs, rewards and weights are the same; counts that depend on the composition of forwards may differ.
    assert {key for key in first if first[key] != second[key]} <= {"recipe", "metrics"}
    for one, other in zip(first["metrics"], second["metrics"], strict=True):
        same = [key for key in one if one[key] == other[key]]
        assert {"reward", "loss", "grad_norm", "sampled_tokens"} <= {*same} or one["eval"] == other["eval"]
    # A run is not resumed with another tool.
    with pytest.raises(UserError, match=r"looking\.py: the file has changed"):
        train(recipe(), "run", resume=True)


def test_a_run_is_not_resumed_with_the_changed_file_of_a_tool(make_recipe: Make, tmp_path: Path) -> None:
    tool = tmp_path / "tool.py"
    tool.write_text("def f(): return 'a'\n")
    changes = {"tools": {"f": {"function": f"{tool}:f"}}, "run": {"steps": 1, "eval_every": None, "save_every": 1}}
    train(make_recipe(**changes), tmp_path / "run")
    longer = make_recipe(**changes | {"run": changes["run"] | {"steps": 2}})
    tool.write_text("def f(): return 'b'\n")
    with pytest.raises(UserError, match=r"tool\.py: the file has changed since the run's last checkpoint"):
        train(longer, tmp_path / "run", resume=True)


def test_rollout_and_eval(recipe: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]) -> None:
    made = recipe()
    made.write("r.toml")
    assert made.data is not None and made.data.dev is not None
    sampling = ["rollout", "--recipe", "r.toml", "--questions", made.data.dev, "--n", "2"]
    assert cli.run([*sampling, "--out", "a.jsonl"]) == 0
    assert "tool calls" in capsys.readouterr().out
    Path("looking.py").write_text(LOOKING.replace("number = next(COUNT)", "raise SystemExit"))
    assert cli.run([*sampling, "--out", "b.jsonl", "--set", "rollout.tools_replay=a.jsonl"]) == 0
    of_a, of_b = ([entry | {"settings": ""} for entry in stored(Path(name))] for name in ("a.jsonl", "b.jsonl"))
    assert of_a == of_b
    calls = [call for entry in stored(Path("a.jsonl")) for call in entry.get("tools", [])]
    assert calls and all(call["text"][0].isdigit() or call["error"] for call in calls)
    Path("looking.py").write_text(LOOKING)
    assert cli.run(["eval", "r.toml", "--out", "e"]) == 0
    shown = json.loads(Path("e/metrics.json").read_text())["tools"]
    assert re.fullmatch(r"look \d+; \d+ errors", shown) and "Calls of tools" in Path("e/table.md").read_text()
    assert cli.run(["eval", "r.toml", "--out", "f", "--set", "rollout.tools_replay=e"]) == 0
    one, other = (stored(Path(folder) / "trajectories.jsonl") for folder in ("e", "f"))
    assert one == other and any("tools" in entry for entry in one)
    # Results of another run are not used.
    assert cli.run(["eval", "r.toml", "--out", "g", "--seed", "5", "--set", "rollout.tools_replay=a.jsonl"]) != 0
    assert ": was " in (said := capsys.readouterr().err) or "is not recorded" in said


def test_a_system_whose_tool_the_recipe_lacks(recipe: Callable[..., Recipe], tiny_tokenizer: Tokenizer) -> None:
    made = recipe()
    assert read_setting(made).searched == 2 * 30  # results take room as passages do
    tables = made.to_dict()
    del tables["tools"]
    lacking = make_recipe(tables, "r.toml")
    with pytest.raises(
        UserError, match=r"looking calls the tool look, which the recipe does not name; .*\[tools\.look\]"
    ):
        make_prompt_context(lacking, tiny_tokenizer)


SMALL = {"model": {"path": "m"}}


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        ({"a": {}}, r"r\.toml: \[tools\.a\] function: expected one of function, FILE\.py:FUNCTION, or url"),
        (
            {"a": {"function": "f.py:g", "url": "http://x"}},
            r"\[tools\.a\] function: expected one of .* got function and url",
        ),
        ({"a": {"function": "f.py"}}, r'\[tools\.a\] function: expected FILE\.py:FUNCTION, got "f\.py"'),
        ({"a": {"function": "f.py:1"}}, r"expected FILE\.py:FUNCTION"),
        ({"a": {"url": "u", "timeout": 0}}, r"\[tools\.a\] timeout: expected a number > 0, got 0"),
        ({"a": {"url": "u", "timeot": 1}}, r"\[tools\.a\] timeot: unknown key; did you mean timeout\?"),
        ({"a": {"url": "u", "concurrency": 0}}, r"\[tools\.a\] concurrency: expected an integer >= 1"),
        (
            {"a": {"url": "u", "max_tokens": 600}},
            r"\[tools\.a\] max_tokens: expected at most rollout\.max_passage_tokens",
        ),
        ({"a b": {"url": "u"}}, r"\[tools\] a b: expected a name of at most 64 letters, digits, _ and -"),
        ({"a": 3}, r"\[tools\] a: expected a section, got 3"),
        (3, r"r\.toml: tools: expected a section under each name, got 3"),
    ],
)
def test_refused_sections(tools: Any, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        make_recipe({**SMALL, "tools": tools}, "r.toml")


def test_the_section_in_a_recipe(tmp_path: Path) -> None:
    overrides = ["tools.b.function=f.py:g", "tools.a.url=http://y", "tools.a.timeout="]
    tables = {**SMALL, "tools": {"a": {"url": "http://x", "timeout": 3}}}
    recipe = make_recipe(json.loads(json.dumps(tables)), "r.toml", overrides)
    assert recipe.tools is not None and [*recipe.tools] == ["a", "b"] and recipe.tools["a"].timeout == 10
    assert recipe.keys()["tools.a.url"] == "http://y"
    recipe.write(tmp_path / "r.toml")
    assert load_recipe(tmp_path / "r.toml") == recipe
    # A run may be resumed with another address and concurrency, not another limit; without tools nothing changes.
    digests = {}
    for key, value in (("url", "http://z"), ("concurrency", 2), ("timeout", 4.0), ("max_tokens", 9)):
        other = make_recipe({**SMALL, "tools": {"a": {"url": "http://x", "timeout": 3, key: value}}}, "r.toml")
        digests[key] = other.digest() == make_recipe(json.loads(json.dumps(tables)), "r.toml").digest()
    assert digests == {"url": True, "concurrency": True, "timeout": False, "max_tokens": False}
    assert "tools" not in make_recipe(dict(SMALL), "r.toml").to_dict()
    with pytest.raises(UserError, match=r"--set tools\.a\.tim: unknown key; did you mean timeout\?"):
        make_recipe(dict(SMALL), "r.toml", ["tools.a.tim="])
