"""`thresher reproduce`: what a manifest says, which commands it becomes, and the table. Training and evaluation are
tested elsewhere; here a command writes what the real one writes last."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from thresher.engine.config.recipe import load_recipe
from thresher.engine.reproduction.commands import Scale, cells_of, in_world
from thresher.engine.reproduction.manifest import make_manifest, paper_names, read_manifest
from thresher.engine.reproduction.run import listing, reproduce
from thresher.engine.reproduction.tables import markdown, results_of
from thresher.engine.synthetic.shared_base import RECIPES
from thresher.engine.systems import load_system
from thresher.rewards.errors import UserError

PAPER = Scale("paper")
QUESTIONS = [{"id": str(n), "question": "?", "answer": "a", "hops": 1 + n % 2} for n in range(20)]


class Killed(Exception):
    pass


@pytest.fixture
def run_command() -> Callable[[list[str]], None]:
    """Writes what the command writes last; an evaluation is right on even questions, and more often with the reward."""

    def run(words: list[str]) -> None:
        out = Path(words[words.index("--out") + 1])
        out.mkdir(parents=True, exist_ok="--resume" in words)
        if words[0] == "train":
            (out / "summary.json").write_text("{}")
        if words[0] == "data":
            (out / "test.jsonl").write_text("".join(json.dumps(record) + "\n" for record in QUESTIONS))
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


@pytest.mark.parametrize("name", paper_names())
def test_a_manifest_is_of_systems_recipes_and_files_that_are_there(name: str) -> None:
    manifest = read_manifest(name)
    for method in manifest.methods.values():
        assert (method.system is None) != (method.baseline is None)
        if method.system is not None:
            load_system(method.system, method.options)
        if method.recipe is not None:
            recipe = load_recipe(RECIPES / method.recipe)
            named = [recipe.data and recipe.data.train, recipe.data and recipe.data.dev]
            named += [recipe.retrieval and recipe.retrieval.index]
            assert {path for path in named if path} <= manifest.files.keys()
    for table in manifest.tables.values():
        labels = [manifest.label(row) for row in table.rows]
        assert len(set(labels)) == len(labels) and (table.against is None or table.against in labels)
        assert all(cells_of(manifest, table, PAPER, Path("x")))
    assert len(listing(manifest)) == sum(len(table.rows) for table in manifest.tables.values())


def test_killed_at_every_command_it_goes_on_and_does_nothing_twice(
    tmp_path: Path, run_command: Callable[[list[str]], None]
) -> None:
    ran: list[str] = []

    def killed(words: list[str]) -> None:
        ran.append(f"{words[0]} {words[words.index('--out') + 1]}")
        run_command(words)
        raise Killed

    for _ in range(30):
        try:
            found = reproduce("eval_rar", ["T2"], Scale("world", (0, 1)), tmp_path, killed)
            break
        except Killed:
            continue
    assert len(ran) == len(set(ran)) == 6 + 2 * 2 * 2  # the world's commands; two methods, two seeds, train and eval
    with_reward, without = found["T2"]["rows"]
    assert with_reward["ours"]["em"]["nq"] == {"mean": 1.0, "deviation": 0.0, "seeds": [1.0, 1.0], "questions": 10} | {
        "difference": 0.5,
        "p": pytest.approx(2 / 2**5),
    }
    assert without["ours"]["em"]["hotpotqa"]["mean"] == 0.0 and "p" not in without["ours"]["em"]["hotpotqa"]
    page = (tmp_path / "T2.md").read_text()
    assert "| Eval-RAR (base) | .471 | 1.000 ± .000 | 0.062 | .412 | .000 ± .000 | 1 |" in page
    assert json.loads((tmp_path / "T2.json").read_text()) == found["T2"]


def test_overrides_and_a_limit_reach_every_command(tmp_path: Path) -> None:
    manifest = read_manifest("eval_rar")
    for name in ("paper", "world"):
        scale = Scale(name, overrides=("run.steps=2",), limit=3)
        for cell in cells_of(manifest, manifest.tables["T1"], scale, tmp_path):
            trains = [command for command in cell.before if command.words[0] == "train"]
            assert all("run.steps=2" in command.words for command in trains)
            for command in cell.evaluations.values():
                assert command.words[command.words.index("--limit") + 1] == "3"
                assert ("run.steps=2" in command.words) != ("--best" in command.words)


def test_a_training_that_was_begun_goes_on(tmp_path: Path) -> None:
    manifest = read_manifest("eval_rar")
    cell = cells_of(manifest, manifest.tables["T2"], Scale("world"), tmp_path)[0]
    train = cell.before[-1]
    assert "--resume" not in train.to_run() and not train.finished
    train.folder.mkdir(parents=True)
    assert train.to_run()[-1] == "--resume"


def test_columns_of_the_same_noise_share_an_evaluation_in_the_world(tmp_path: Path) -> None:
    manifest = read_manifest("eviomni")
    (cell,) = cells_of(manifest, manifest.tables["F5"], Scale("world"), tmp_path)
    asked = {column: " ".join(command.words) for column, command in cell.evaluations.items()}
    assert asked["nq"] == asked["hotpotqa"] and "--noise" not in asked["nq"]
    assert asked["nq_noise8"] == asked["hotpotqa_noise8"] and "--noise 8" in asked["nq_noise8"]
    assert len({command.folder for command in cell.evaluations.values()}) == 5 and len(asked) == 10
    (trained, _) = cells_of(manifest, manifest.tables["F5"], PAPER, tmp_path)
    assert "--noise 4" in " ".join(trained.evaluations["tqa_noise4"].words)


def test_at_paper_scale_what_is_absent_is_said_and_the_rest_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    ran: list[list[str]] = []
    reproduce("eval_rar", ["T1"], PAPER, Path("out"), ran.append)
    said = capsys.readouterr().out
    assert ran == [] and said.count("models/Qwen2.5-3B: hf download") == 1 and "data/nq_test.jsonl: NQ's" in said
    for path in ("models/Qwen2.5-3B/config.json", "data/nq_test.jsonl"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text("{}")
    reproduce("eval_rar", ["T1"], PAPER, Path("out"), ran.append)
    assert [words[0] for words in ran] == ["eval"] * 5  # two without retrieval, three that name an index of their own
    assert all("data/nq_test.jsonl" in words for words in ran) and {"direct", "cot"} <= {words[-5] for words in ran}


def test_the_printed_average_stands_beside_ours_where_every_column_is_there(tmp_path: Path) -> None:
    manifest = read_manifest("eval_rar")
    table = manifest.tables["T2"]
    cells = cells_of(manifest, table, PAPER, tmp_path)
    for number, command in enumerate(cells[0].evaluations.values()):
        command.folder.mkdir(parents=True)
        record = {"id": "q", "question": "?", "parts": {}, "measures": {"em": float(number % 2)}}
        (command.folder / "trajectories.jsonl").write_text(json.dumps(record) + "\n")
        (command.folder / "metrics.json").write_text("{}")
    page = markdown(results_of(manifest, table, PAPER, cells))
    assert "Average, printed | ours | p |" in page and "| .404 | .429 |  |" in page and "| .353 | - |  |" in page


def test_methods_of_the_world_are_those_that_its_base_knows() -> None:
    manifest = read_manifest("eval_rar")
    assert [name for name, method in manifest.methods.items() if in_world(method)] == [
        "eval_rar",
        "without_evaluation",
        "search_r1",
    ]


def test_what_is_refused() -> None:
    with pytest.raises(UserError, match=r"no paper 'evalrar'; choose one of .*eval_rar"):
        read_manifest("evalrar")
    with pytest.raises(UserError, match="eval_rar has no table 'T9' here; choose of T1, T2"):
        reproduce("eval_rar", ["T9"], PAPER, Path("x"), print)
    row: dict[str, Any] = {"method": "m", "model": "a", "printed": {"em": [1.0]}}
    found: dict[str, Any] = {
        "title": "x",
        "models": {"a": {"paper": "p", "get": "g"}},
        "sets": {"s": {"label": "S", "paper": "p", "get": "g"}},
        "methods": {"m": {"label": "M", "baseline": "direct"}},
        "tables": {"T1": {"caption": "c", "columns": ["s"], "rows": [row]}},
    }
    assert make_manifest("x", found).tables["T1"].rows[0].printed == {"em": [1.0]}
    row["printed"] = {"em": [1.0, 2.0]}
    with pytest.raises(UserError, match=r"\[tables.T1\]: M: em has 2 numbers of 1"):
        make_manifest("x", found)
    row["method"] = "n"
    with pytest.raises(UserError, match="a row of method 'n' and model 'a', which are not both there"):
        make_manifest("x", found)
    found["tables"]["T1"]["columns"] = ["t"]
    with pytest.raises(UserError, match="column 't' is no set"):
        make_manifest("x", found)
