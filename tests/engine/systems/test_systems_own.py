"""A user's own system: the worked example of docs/systems.md, exactly as given there, and files that are no system."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from thresher.cli import main as cli
from thresher.common.errors import UserError
from thresher.engine.config.sections import SystemSection
from thresher.engine.episode import EpisodeConfig, Turn
from thresher.engine.rollout.rollout import Job, Rollout
from thresher.engine.scoring.score import score
from thresher.engine.systems import NAMES, built_in, load_system, own_digest
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question
from thresher.rewards.reward import RewardInput, Source, TextSegment

DOCS = Path(__file__).resolve().parents[3] / "docs" / "systems.md"
PAGE = DOCS.read_text(encoding="utf-8")


@pytest.fixture
def quote(tmp_path: Path) -> Path:
    """Write the worked example of the page to a file."""
    _, code = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    path = tmp_path / "quote.py"
    path.write_text(code, encoding="utf-8")
    return path


def rated(tmp_path: Path, system: Path | str, record: dict[str, Any], *flags: str) -> dict[str, Any]:
    (tmp_path / "t.jsonl").write_text(json.dumps(record) + "\n")
    out = tmp_path / "rewards.jsonl"
    command = ["score", "--system", str(system), "--transcripts", str(tmp_path / "t.jsonl"), "--out", str(out), *flags]
    assert cli.run(command) == 0
    entry: dict[str, Any] = json.loads(out.read_text())
    return entry


def test_the_worked_example_scores_the_transcript_beside_it(quote: Path, tmp_path: Path) -> None:
    record = json.JSONDecoder().raw_decode(PAGE[PAGE.index('{"id": "1"') :])[0]
    entry = rated(tmp_path, quote, record)
    measures = {"em": True, "f1": 1.0, "answered": True}
    parts = {"answer": 1.0, "quote": 1.0, **measures}
    assert entry == {"id": "1", "reward": 1.5, "parts": parts, "answer": "Anna Bell"}
    assert rated(tmp_path, quote, record, "--set", "bonus=1")["reward"] == 2
    for written, expected in [
        ("<quote>Anna mapped it.</quote><answer>Anna Bell</answer>", 1),  # not word for word
        ("<quote>It is cold.</quote><answer>Anna Bell</answer>", 1),  # the quote settles nothing
        ("<quote></quote><answer>Anna Bell</answer>", 1),
        ("<quote>Anna Bell mapped it.</quote><answer>Bo</answer>", 0),
        ("<answer>Anna Bell</answer>", 1),
    ]:
        segments = [{"source": "policy", "text": written}]
        assert rated(tmp_path, quote, record | {"segments": segments})["reward"] == expected
    passage = [{"source": "retrieved", "text": "<quote>Anna Bell mapped it.</quote><answer>Anna Bell</answer>"}]
    assert rated(tmp_path, quote, record | {"segments": passage})["reward"] == 0


def test_the_worked_example_in_a_rollout(
    quote: Path, monkeypatch: pytest.MonkeyPatch, tiny_rollout: Callable[..., Rollout], tiny_questions: list[Question]
) -> None:
    """The path is relative, as in a recipe; every trajectory ends, is judged, and shows the given passages."""
    monkeypatch.chdir(quote.parent)
    system = load_system("./quote.py", {"bonus": 1})
    questions = [replace(q, passages=(Passage("p", "T", f"It is {q.golds[0]}."),)) for q in tiny_questions[:8]]
    run = tiny_rollout(system, template="{question}\n{passages}\n<answer>")
    trajectories = run.run([Job(q, i, 0, i) for i, q in enumerate(questions)], 1.0)
    scored = score(questions, trajectories, system, run.tokenizer)
    assert len(scored) == 8 and all(entry.trajectory.reason for entry in scored)
    assert all(entry.result.parts.keys() == {"answer", "quote", "em", "f1", "answered"} for entry in scored)
    for entry in scored:
        prompt, turn = entry.trajectory.segments
        assert (prompt.source, turn.source) == (Source.PROMPT, Source.POLICY)
        assert f"It is {entry.question.golds[0]}." in run.tokenizer.decode(prompt.ids)


def test_the_example_has_a_preset_that_a_recipe_takes(quote: Path, tmp_path: Path) -> None:
    from thresher.engine.assemble import read_run_recipe

    (tmp_path / "r.toml").write_text(
        f'[model]\npath = "m"\n[system]\nname = "{quote}"\noptions = {{ bonus = 1.0 }}\n[retrieval]\nindex = "i"\n'
    )
    recipe = read_run_recipe(tmp_path / "r.toml", [])
    assert recipe.need(SystemSection).name == str(quote)
    assert (recipe.retrieval and recipe.retrieval.k, recipe.rollout.group_size, recipe.grpo.beta) == (5, 8, 1e-3)


def test_the_page_names_every_system_and_switch() -> None:
    from thresher.engine.config.tables import hints

    for name in NAMES:
        assert f"**{name}**" in PAGE
        for switch in hints(built_in(name)[0]):
            assert f"`{switch}`" in PAGE, f"{name} has a switch {switch}"


GOOD = "from dataclasses import dataclass\n\n\n@dataclass(frozen=True)\nclass Options:\n    size: int = 1\n\n\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "needs a dataclass Options and a function system(options); add what is missing"),
        ("class Options:\n    pass\n\n\ndef system(options):\n    pass\n", "needs a dataclass Options"),
        (GOOD, "needs a dataclass Options and a function system(options)"),
        (GOOD + "system = 3\n", "needs a dataclass Options and a function system(options)"),
        (GOOD + "def system(options):\n    return 3\n", "system(options) returned int; it should return a System"),
        (
            GOOD + "def system(options):\n    return options.sise\n",
            "raised AttributeError ('Options' object has no attribute 'sise') at line 10; fix the file",
        ),
        ("import nowhere_to_be_found\n", "importing it raised ModuleNotFoundError (No module named"),
        ("\n\nx = 1 / 0\n", "importing it raised ZeroDivisionError (division by zero) at line 3; fix the file"),
        ("def f(:\n", "importing it raised SyntaxError (invalid syntax) at line 1; fix the file"),
        ("raise SystemExit(3)\n", "importing it raised SystemExit (3) at line 1; fix the file"),
        (None, "no such Python file; name a system, or the path of a file that ends in .py"),
    ],
)
def test_a_file_that_is_no_system_ends_in_a_sentence(
    text: str | None, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    command = ["score", "--system", str(path), "--transcripts", "none.jsonl", "--out", str(tmp_path / "out.jsonl")]
    assert cli.run(command) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"thresher: {path}: ") and problem in message and message.count("\n") == 1


OWN = """from thresher.engine.episode import System
from thresher.rewards.reward import RewardResult


def reward(attempt):
"""
NONE_YET = "{'em': 0, 'f1': 0, 'answered': 0}"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return attempt.golds[9]", "raised IndexError (tuple index out of range) at line 14; fix the file"),
        ("raise SystemExit(0)", "raised SystemExit (0) at line 14; fix the file"),
        ("raise GeneratorExit", "raised GeneratorExit at line 14; fix the file"),
        ("return 1.0", "returned float; it should return a RewardResult; fix the file"),
        ("return RewardResult(1.0, None, None)", "returned parts of NoneType; they should be a dict"),
        (
            f"return RewardResult(1.0, {NONE_YET} | {{'x': 'y'}}, None)",
            "returned x = 'y', which is not a finite number",
        ),
        ("return RewardResult(None, {}, None)", "returned reward = None, which is not a finite number"),
        (f"return RewardResult(float('nan'), {NONE_YET}, None)", "returned reward = nan, which is not a finite number"),
        (
            f"return RewardResult(1e308, {NONE_YET}, None)",
            "returned reward = 1e+308, which is not a finite number of at",
        ),
        (f"return RewardResult(10**400, {NONE_YET}, None)", "returned reward = a huge number, which is not a finite"),
        (f"return RewardResult(10**9999, {NONE_YET}, None)", "returned reward = a huge number, which is not a finite"),
        (f"return RewardResult(0, {NONE_YET}, 3)", "returned an answer of int; it should be a string"),
    ],
)
def test_a_reward_that_no_step_could_use_ends_in_a_sentence_before_anything_is_made(
    body: str, problem: str, tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    made = (
        "\n\ndef system(options):\n    return System('mine', ('<answer>', '</answer>'), None, reward, '{question}')\n"
    )
    path.write_text(GOOD + OWN + f"    {body}\n" + made)
    (tmp_path / "r.toml").write_text(f'[model]\npath = "none"\n[system]\nname = "{path}"\n')
    out = ["--out", str(tmp_path / "out")]
    for command in (
        ["score", "--system", str(path), "--transcripts", "none.jsonl"],
        ["eval", "--model", str(tiny_model_folder), "--system", str(path), "--questions", "none.jsonl"],
        ["train", str(tmp_path / "r.toml")],
    ):
        assert cli.run([*command, *out]) == 2
        message = capsys.readouterr().err
        assert message.startswith(f"thresher: {path}: reward(attempt) ") and problem in message
        assert message.count("\n") == 1 and not (tmp_path / "out").exists()
    # A fault that appears only with certain policy text gives the same error, later.
    later = f"    if not attempt.pieces[-1].text:\n        return RewardResult(0, {NONE_YET}, None)\n    {body}\n"
    path.write_text(GOOD + OWN + later + made)
    attempt = RewardInput(pieces=[TextSegment(Source.POLICY, b"x")], golds=("x",))
    with pytest.raises(UserError, match=r"mine\.py: reward\(attempt\) r.*; fix the file"):
        load_system(str(path), {}).reward(attempt)


@pytest.mark.parametrize(
    ("right", "broken", "what"),
    [
        (
            "yield Prompt(",
            "yield Prompts(",
            "episode(question, config) raised NameError (name 'Prompts' is not defined",
        ),
        ("yield Prompt(", "return Prompt(", "episode(question, config) returned Prompt("),
        ("yield Prompt(config.template,", "yield (config.template,", "episode(question, config) yielded first ("),
        (
            "yield Generate(",
            "yield Prompt('{question}', question.question) or dict(",
            "episode(question, config) yielded after its prompt Prompt(",
        ),
        ("yield Generate(", "yield print(", "episode(question, config) raised TypeError"),
        ('return "answered"', "raise SystemExit", "episode(question, config) raised SystemExit at line"),
        ('return "answered"', "return 1", "episode(question, config) returned 1"),
    ],
)
def test_an_episode_that_fails_is_the_files(
    right: str, broken: str, what: str, quote: Path, tiny_questions: list[Question]
) -> None:
    text = quote.read_text()
    assert right in text
    quote.write_text(text.replace(right, broken, 1))
    question = replace(tiny_questions[0], passages=(Passage("p", "T", "It is so."),))
    with pytest.raises(UserError, match=re.escape(f"{quote}: {what}")):
        running = load_system(str(quote), {}).episode(question, EpisodeConfig("{question}\n{passages}", 2))
        next(running)
        while True:
            running.send(Turn(b"<answer>so</answer>", "</answer>"))


def test_switches_of_an_own_system_are_checked_and_a_folder_is_no_file(quote: Path) -> None:
    with pytest.raises(UserError, match=r"\[system.options\]: bonuss: unknown key; did you mean bonus\?"):
        load_system(str(quote), {"bonuss": 1})
    with pytest.raises(UserError, match='bonus: expected a number, got "x"'):
        load_system(str(quote), {"bonus": "x"})
    with pytest.raises(UserError, match="no such Python file"):
        load_system(str(quote.parent) + "/", {})


def test_a_file_is_read_anew_and_two_of_one_name_are_two(tmp_path: Path) -> None:
    made = OWN + "    parts = {{'em': 0, 'f1': 0, 'answered': 0}}\n    return RewardResult(0, parts, None)\n"
    made += "\n\ndef system(options):\n    return System({!r}, (), None, reward, '')\n"
    paths = [tmp_path / folder / "mine.py" for folder in "ab"]
    for path in paths:
        path.parent.mkdir()
        path.write_text(GOOD + made.format(path.parent.name))
    assert [load_system(str(path), {}).name for path in paths] == ["a", "b"]
    paths[0].write_text(GOOD + made.format("c"))
    assert [load_system(str(path), {}).name for path in paths] == ["c", "b"]
    assert not list(tmp_path.rglob("*.pyc")), "nothing is left beside a user's file"


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    parts = "{'em': np.float32(0.5), 'f1': None, 'answered': 1}"
    body = f"    import numpy as np\n    return RewardResult(np.sum([1, 2]), {parts})\n"
    made = "\n\ndef system(options):\n    return System('mine', (), None, reward, '')\n"
    (tmp_path / "mine.py").write_text(GOOD + OWN + body + made)
    found = load_system(str(tmp_path / "mine.py"), {}).reward(RewardInput(pieces=[], golds=()))
    assert (found.reward, found.parts) == (3.0, {"em": 0.5, "f1": None, "answered": 1})
    assert type(found.reward) is float and type(found.parts["em"]) is float


def test_a_file_imports_what_lies_beside_it(quote: Path, tmp_path: Path) -> None:
    """Two systems may import neighbours of the same name; a changed neighbour changes the digest."""
    systems, digests = [], []
    for name, bonus in (("a", "1.0"), ("b", "2.0")):
        folder = tmp_path / name
        (folder / "parts").mkdir(parents=True)
        (folder / "helper.py").write_text("from parts.numbers import BONUS\n")
        (folder / "parts" / "numbers.py").write_text(f"BONUS = {bonus}\n")
        own = folder / "quote.py"
        code = quote.read_text().replace("bonus: float = 0.5", "bonus: float = BONUS")
        own.write_text(code.replace("from thresher", "from helper import BONUS\nfrom thresher", 1))
        systems.append(load_system(str(own), {}))
        digests.append(own_digest(str(own)))
    attempt = RewardInput(
        pieces=[TextSegment(Source.POLICY, b"<quote>Anna mapped it.</quote><answer>Anna</answer>")],
        golds=("Anna",),
        question="Who?",
        passages=[("", "Anna mapped it.")],
    )
    assert [system.reward(attempt).reward for system in systems] == [2.0, 3.0]
    assert "helper" not in sys.modules and "parts.numbers" not in sys.modules and str(tmp_path / "a") not in sys.path
    assert sorted(path.name for path in (tmp_path / "a").rglob("*")) == ["helper.py", "numbers.py", "parts", "quote.py"]

    (tmp_path / "a" / "parts" / "numbers.py").write_text("BONUS = 4.0\n")
    assert load_system(str(tmp_path / "a" / "quote.py"), {}).reward(attempt).reward == 5.0
    assert len({*digests, own_digest(str(tmp_path / "a" / "quote.py"))}) == 3
    assert own_digest(str(quote)) == sha256(quote.read_bytes()).hexdigest(), "of a file alone it is the file's"
