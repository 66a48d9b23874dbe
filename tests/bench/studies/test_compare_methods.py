"""Test `thresher compare-methods`: its file, how processes share its work, and its claims about made-up rows."""

import json
import os
import random
import shlex
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from train_cases import Make, metrics, single_threaded, stored

from thresher.bench.studies.methods import (
    SHIPPED,
    Comparison,
    Job,
    analysis,
    between,
    filled,
    jobs_of,
    markdown,
    measure_of,
    packed,
    read_comparison,
    recipe_of,
    run_comparison,
    runs_of,
    unpacked,
    work_through,
)
from thresher.bench.studies.runs import head_of
from thresher.cli.main import build_parser
from thresher.common.errors import UserError
from thresher.common.locks import locked_file
from thresher.engine.store.run_folder import SPENT, RunFolder, tokens_spent
from thresher.engine.training.step import Diverged
from thresher.rewards.statistics import minimum_detectable_effect

HEAD = """
recipe = "{recipe}"
baseline = "plain"
seeds = [0, 1]
budgets = [300, 600]
control = ["grpo.shuffle_rewards=true"]
set = ["run.steps=9", "run.eval_every=1", "optim.lr=1e-3"]
prepare = ["copy --out {{out}}/shared", "copy --from {{condition}} --out {{out}}/own{{seed}}"]

[methods]
plain = []
none = ['grpo.scale="none"']
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, make_recipe: Make) -> Path:
    folder = tmp_path_factory.mktemp("comparison")
    recipe = make_recipe(rollout={"questions_per_step": 2, "group_size": 2})
    (folder / "recipe.toml").write_text(recipe.to_toml())
    (folder / "methods.toml").write_text(HEAD.format(recipe=folder / "recipe.toml"))
    return folder / "methods.toml"


def read(text: str, tmp_path: Path) -> Comparison:
    (tmp_path / "methods.toml").write_text(text)
    return read_comparison(tmp_path / "methods.toml")


# --- the file


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('baseline = "plain"', 'baseline = "plan"', "baseline: expected one of plain, none, got 'plan'"),
        ("seeds = [0, 1]", "seeds = [0, 0]", "seeds: expected one or more different numbers"),
        ("budgets = [300, 600]", "budgets = [0]", "budgets: expected one or more different numbers of at least 1"),
        ("plain = []", "plain = 3", r"\[methods\] plain: expected a list of settings"),
        ("seeds", "sead", "unknown key"),
        ("plain = []", 'plain = []\n"lr/3" = []', r"expected names such as lr-3, without / and spaces, got 'lr/3'"),
        (
            "none = [",
            '"plain-control" = [',
            "two runs would be called plain-control-seed0; give a method or a condition",
        ),
        ("[methods]", "[methods", "expected a comparison in TOML"),
        ("seeds = [0, 1]", 'seeds = [0, 1]\nmeasure = "bleu"', 'measure: expected "em", "f1" or "reward"'),
        ("seeds = [0, 1]", "seeds = [0, 1]\ncontrol_seeds = [2]", "control_seeds: expected some of seeds"),
    ],
)
def test_a_bad_file_is_refused_by_its_key(tmp_path: Path, old: str, new: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        read(HEAD.format(recipe="r.toml").replace(old, new), tmp_path)


def test_a_file_that_is_not_there_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^\S*none.toml: no such file; check the path"):
        read_comparison(tmp_path / "none.toml")


def test_a_command_without_a_folder_is_refused(file: Path, tmp_path: Path) -> None:
    plan = read(file.read_text().replace("copy --out {out}/shared", "copy"), tmp_path)
    with pytest.raises(UserError, match="prepare: expected a command with --out FOLDER, got copy"):
        run_comparison(plan, tmp_path / "out", lambda words: None)


def test_runs_and_their_settings(file: Path, tmp_path: Path) -> None:
    text = file.read_text() + '[conditions]\nfew = ["rollout.group_size=3"]\nmany = ["rollout.group_size=4"]\n'
    plan = read(text.replace("seeds = [0, 1]", "seeds = [0, 1]\ncontrol_seeds = [1]"), tmp_path)
    runs = runs_of(plan)
    assert [run.name for run in runs[:4]] == [
        "few-plain-seed0",
        "few-none-seed0",
        "many-plain-seed0",
        "many-none-seed0",
    ]
    assert [run.name for run in runs[4:6]] == ["few-plain-seed1", "few-plain-control-seed1"] and len(runs) == 4 + 8
    recipe = recipe_of(plan, tmp_path, runs[-1])
    assert (recipe.run.seed, recipe.run.token_budget, recipe.rollout.group_size) == (1, 600, 4)
    assert recipe.grpo.shuffle_rewards and recipe.grpo.scale == "none"


def test_the_command_line_goes_before_the_file(file: Path) -> None:
    plan = read_comparison(file, [1], [50], ["run.steps=2"])
    assert (plan.seeds, plan.budgets, plan.set[-2:]) == ((1,), (50,), ("optim.lr=1e-3", "run.steps=2"))


def test_the_file_that_the_page_shows_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "comparisons.md").read_text("utf-8")
    plan = read(page.partition("```text\n")[2].partition("```")[0], tmp_path)
    assert [run.name for run in runs_of(plan)][1] == "low-search_r1-control-seed0"


@pytest.mark.parametrize("name", sorted(path.name for path in SHIPPED.glob("*.toml")))
def test_a_shipped_file_fits_the_recipes_and_the_command_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    plan, out, typed = read_comparison(name, [0]), Path("out"), []
    for run in runs_of(plan):
        recipe = recipe_of(plan, out, run)
        assert (recipe.run.token_budget, recipe.optim.schedule) == (max(plan.budgets), "constant")
        typed += [filled(text, out, run) for text in plan.prepare]
    shared = {repr(recipe_of(plan, out, run).optim) for run in runs_of(plan)}
    assert len(shared) == 1  # no preset sets its own learning rate
    for text in dict.fromkeys(typed):
        build_parser().parse_args(shlex.split(text))


# --- work


def test_commands_are_done_once_and_before_what_needs_them(file: Path, tmp_path: Path) -> None:
    typed: list[str] = []

    def run_command(words: list[str]) -> None:
        typed.append(" ".join(words))
        Path(words[-1]).mkdir(parents=True)

    plan, out = read_comparison(file), tmp_path / "out"
    jobs = jobs_of(plan, out, runs_of(plan), run_command)
    work_through([job for job in jobs if job.out.parent == out])
    shared, first, second = typed
    assert shared == f"copy --out {out}/shared"
    assert [first, second] == [f"copy --from  --out {out}/own{seed}".replace("  ", " ") for seed in (0, 1)]
    needs = {job.name: [one.name for one in job.after] for job in jobs}
    assert needs["plain-seed0"] == ["shared", "own0"] and needs["none-control-seed1"] == ["shared", "own1"]
    assert needs["own1"] == ["shared"]


def test_what_another_process_does_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock belongs to an open file, so a second open file in this process acts like another process."""
    monkeypatch.setattr("thresher.common.locks.WAIT", 0.01)
    done: list[str] = []

    def job(name: str, after: tuple[Job, ...] = ()) -> Job:
        def run() -> None:
            done.append(name)
            (tmp_path / name).touch()

        return Job(name, tmp_path / name, (tmp_path / name).exists, run, after)

    held, free = job("held"), job("free")
    behind = job("behind", (held,))
    with locked_file(held.out):
        worker = threading.Thread(target=work_through, args=([held, free, behind],))
        worker.start()
        while not free.done():
            pass
        assert done == ["free"]
    worker.join()
    assert done == ["free", "held", "behind"]


def copying(words: list[str]) -> None:
    Path(words[-1]).mkdir(parents=True)


@pytest.fixture(scope="module")
def compared(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compared") / "out"
    with single_threaded():
        run_comparison(read_comparison(file), out, copying)
    return out


def test_every_run_ends_by_the_largest_budget_and_leaves_a_row(file: Path, compared: Path) -> None:
    rows = stored(compared / "rows.jsonl")
    assert [row["name"] for row in rows] == [run.name for run in runs_of(read_comparison(file))] and len(rows) == 8
    for row in rows:
        *_, before, last = row["curve"]
        run = compared / "runs" / row["name"]
        assert (
            before["tokens"] < 600 <= last["tokens"] == tokens_spent(metrics(run)) == sum(row[kind] for kind in SPENT)
        )
        evaluated = [record["eval"] for record in metrics(run) if "eval" in record]
        for point, found in zip(row["curve"], evaluated, strict=True):
            values = unpacked(point["questions"])
            assert len(values) == found["questions"] and sum(values) / len(values) == pytest.approx(found["em"])
            assert point["em"] == found["em"] and point["searches"] == found["searches"]
    found = json.loads((compared / "methods.json").read_text())
    assert [(table["axis"], table["at"]) for table in found["tables"][:2]] == [("tokens", 300), ("tokens", 600)]
    assert found["tables"][2]["axis"] == "seconds" and (compared / "curves.png").stat().st_size > 10_000


def test_a_second_call_and_stored_rows_repeat_no_run(file: Path, compared: Path, tmp_path: Path) -> None:
    plan, starts = read_comparison(file), [path.read_bytes() for path in sorted(compared.rglob("starts.jsonl"))]
    first = json.loads((compared / "methods.json").read_text())
    again = run_comparison(plan, compared, copying)
    elsewhere = run_comparison(plan, tmp_path / "out", copying, compared / "rows.jsonl")
    assert first["tables"] == again["tables"] == elsewhere["tables"]
    assert [path.read_bytes() for path in sorted(compared.rglob("starts.jsonl"))] == starts
    assert not (tmp_path / "out" / "runs" / "plain-seed0").exists() and not (tmp_path / "out" / "shared").exists()


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_checkpoint(file: Path, compared: Path, tmp_path: Path) -> None:
    text = (
        file.read_text()
        .replace("seeds = [0, 1]", "seeds = [0]")
        .replace('"run.steps=9"', '"run.steps=9", "run.save_every=1"')
    )
    plan, out, pid = read(text, tmp_path), tmp_path / "out", os.fork()
    if pid == 0:
        from thresher.bench.studies import methods

        def die(progress: Any) -> None:
            if progress.step == 2 and "eval" not in progress.record:
                os.kill(os.getpid(), 9)

        whole = methods.train
        methods.train = lambda recipe, folder, resume, watch: whole(recipe, folder, resume, die)
        run_comparison(plan, out, copying)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
    run_comparison(plan, out, copying)
    (first, *_), expected = stored(out / "rows.jsonl"), stored(compared / "rows.jsonl")[0]
    assert len(stored(out / "runs" / first["name"] / "starts.jsonl")) == 2
    other = {"at", "commit", "machine", "settings"}  # this one also saves each step
    for row in (first, expected):
        for point in row["curve"]:
            del point["seconds"]
    assert {k: v for k, v in first.items() if k not in other} == {k: v for k, v in expected.items() if k not in other}


def test_rows_of_another_comparison_are_refused(file: Path, compared: Path, tmp_path: Path) -> None:
    for change, says in ((("em", "f1"), "with the measure 'f1'"), (("600]", "60000]"), "below the largest of budgets")):
        text = file.read_text().replace("seeds = [0, 1]", 'seeds = [0, 1]\nmeasure = "em"').replace(*change)
        plan = read(text, tmp_path)
        with pytest.raises(UserError, match=says):
            run_comparison(plan, tmp_path / "out", copying, compared / "rows.jsonl")
    (tmp_path / "rows.jsonl").write_text(json.dumps(stored(compared / "rows.jsonl")[0] | {"curve": []}) + "\n")
    with pytest.raises(UserError, match="line 1: expected a row of compare-methods"):
        run_comparison(read_comparison(file), tmp_path / "out", copying, tmp_path / "rows.jsonl")


def told(rows: list[dict[str, Any]], plan: Comparison, folder: Path) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError) as error:
        run_comparison(plan, folder / "out", copying, folder / "rows.jsonl", train_more=False)
    return str(error.value)


def test_rows_that_are_none_or_there_twice_are_named(file: Path, compared: Path, tmp_path: Path) -> None:
    plan, rows = read_comparison(file), stored(compared / "rows.jsonl")
    first = rows[0]
    assert "line 9: the run plain-seed0 is in an earlier line too" in told([*rows, first], plan, tmp_path)
    assert "line 1: its name is plain-seed0, but its seed" in told([first | {"method": "none"}], plan, tmp_path)
    for change in ({"tokens": "4"}, {"questions": "zz"}, {"questions": None}, {"em": None}):
        damaged = first | {"curve": [first["curve"][0] | change]}
        assert "line 1: expected a row as compare-methods writes it (" in told([damaged], plan, tmp_path)
    assert "plain-control-seed0: was evaluated on other questions than plain-seed0" in told(
        [first, rows[1] | {"asked": "another"}], plan, tmp_path
    )
    other_seed = next(row for row in rows if row["seed"] == 1)  # the interval draws questions for all seeds at once
    assert "plain-seed1: was evaluated on other questions" in told([first, other_seed | {"asked": "b"}], plan, tmp_path)
    shorter = [{**point, "questions": "11"} for point in rows[1]["curve"]]
    assert "was evaluated on other questions" in told([first, rows[1] | {"curve": shorter}], plan, tmp_path)
    shown = replace(plan, shown=("f1",))
    assert "its evaluations have no f1, which shown lists" in told([first], shown, tmp_path)


def test_without_a_checkout_rows_have_no_commit(file: Path, compared: Path, tmp_path: Path) -> None:
    plan, rows = read_comparison(file), stored(compared / "rows.jsonl")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row | {"commit": None}) + "\n" for row in rows))
    found = run_comparison(plan, tmp_path / "out", copying, tmp_path / "rows.jsonl", train_more=False)
    assert found["commits"] == ["no checkout"] and "of no checkout." in (tmp_path / "out" / "table.md").read_text()


def test_what_is_refused_of_finished_runs_is_told_before_others_are_trained(
    file: Path, compared: Path, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(compared, tmp_path / "out"))
    (out / "rows" / "plain-seed0.json").unlink()
    shutil.rmtree(out / "runs" / "plain-seed0")
    with pytest.raises(UserError, match=r"plain-control-seed0\.json: its run had other settings"):
        run_comparison(read(file.read_text().replace("lr=1e-3", "lr=2e-3"), tmp_path), out, copying)
    assert not (out / "runs" / "plain-seed0").exists()


def test_another_measure_to_show_is_read_from_the_finished_runs(file: Path, compared: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(compared, tmp_path / "out"))
    run_comparison(replace(read_comparison(file), shown=("searches", "f1")), out, copying)
    rows = stored(out / "rows.jsonl")
    assert all(isinstance(point["f1"], float) for row in rows for point in row["curve"])
    assert [row["steps"] for row in rows] == [row["steps"] for row in stored(compared / "rows.jsonl")]


def test_a_measure_that_the_reward_lacks_is_named() -> None:
    with pytest.raises(UserError, match='the reward measures no em, only answer, format; set measure = "reward"'):
        measure_of({"reward": 1.0, "parts": {"answer": 1.0, "format": 0.5}}, "em")


def test_a_row_whose_run_is_gone_is_not_trained_again_for_a_measure(file: Path, compared: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(compared, tmp_path / "out"))
    shutil.rmtree(out / "runs" / "plain-seed0")
    with pytest.raises(UserError, match=r"plain-seed0\.json: its evaluations have no f1, which shown lists"):
        run_comparison(replace(read_comparison(file), shown=("f1",)), out, copying)
    assert not (out / "runs" / "plain-seed0").exists()


def test_a_recipe_that_is_none_is_told_before_anything_is_prepared(file: Path, tmp_path: Path) -> None:
    plan = read_comparison(file, [0], None, ["data.dev="])
    with pytest.raises(UserError, match=r"recipe\.toml: expected held-out questions .*; set data.dev"):
        run_comparison(plan, tmp_path / "out", copying)
    with pytest.raises(UserError, match=r"grpo\.scale"):
        run_comparison(read(file.read_text().replace('"none"\'', '"non"\''), tmp_path), tmp_path / "out", copying)
    assert not (tmp_path / "out").exists()


def test_rows_of_other_settings_are_refused(file: Path, compared: Path, tmp_path: Path) -> None:
    plan = read(file.read_text().replace("optim.lr=1e-3", "optim.lr=2e-3"), tmp_path)
    for out, rows in ((compared, None), (tmp_path / "out", compared / "rows.jsonl")):
        with pytest.raises(UserError, match=r"its run had other settings than the file has now \(optim.lr=2e-3\)"):
            run_comparison(plan, out, copying, rows, train_more=False)


def test_runs_of_an_edited_recipe_are_refused(file: Path, compared: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(compared, tmp_path / "out"))
    path = out / "runs" / "none-seed1" / "recipe.toml"
    path.write_text(path.read_text().replace("group_size = 2", "group_size = 4"))
    with pytest.raises(UserError, match=r"none-seed1: .*other settings \(rollout\.group_size is 4, not 2\)"):
        run_comparison(read_comparison(file), out, copying)


def test_a_training_that_others_need_is_done_with_its_summary(file: Path, tmp_path: Path) -> None:
    plan = read(file.read_text().replace("copy --out {out}/shared", "train r.toml --out {out}/shared"), tmp_path)
    typed: list[list[str]] = []
    shared, *_ = jobs_of(plan, tmp_path / "out", runs_of(plan), typed.append)
    shared.out.mkdir(parents=True)
    assert not shared.done()
    shared.run()
    assert typed == [["train", "r.toml", "--out", str(shared.out), "--resume"]]
    (shared.out / "summary.json").touch()
    assert shared.done()


def test_a_row_names_the_commits_of_all_starts(compared: Path, tmp_path: Path) -> None:
    folder = RunFolder(Path(shutil.copytree(compared / "runs" / "plain-seed0", tmp_path / "run")))
    (start,) = stored(folder.path / "starts.jsonl")
    resumed = [start, start | {"at": "later", "commit": "c0ffee"}]
    (folder.path / "starts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in resumed))
    found = head_of(folder)
    assert found["commit"] == f"{start['commit']}, c0ffee"
    assert found["at"] == start["at"] and found["machine"] == start["machine"]


def test_rows_of_another_recipe_or_other_commands_are_refused(file: Path, compared: Path, tmp_path: Path) -> None:
    for change in (("recipe.toml", "other.toml"), ("copy --from", "copy --of")):
        plan = read(file.read_text().replace(*change), tmp_path)
        with pytest.raises(UserError, match="its run had another recipe, or other commands in prepare"):
            run_comparison(plan, tmp_path / "out", copying, compared / "rows.jsonl", train_more=False)


@pytest.mark.slow
def test_a_run_that_diverges_counts_by_its_last_evaluation(
    file: Path, compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from thresher.bench.studies import methods

    whole = methods.train

    def train(recipe: Any, folder: Path, *rest: Any) -> Any:
        def watch(progress: Any) -> None:
            last = 0 if recipe.grpo.shuffle_rewards else 2
            if recipe.grpo.scale == "none" and progress.step == last and "eval" in progress.record:
                raise Diverged(f"step {last + 1}: a loss is not finite")

        return whole(recipe, folder, False, watch)

    monkeypatch.setattr(methods, "train", train)
    run_comparison(read_comparison(file, [0]), tmp_path / "out", copying)
    rows = {row["name"]: row for row in stored(tmp_path / "out" / "rows.jsonl")}
    assert [name for name, row in rows.items() if "diverged" in row] == ["none-seed0", "none-control-seed0"]
    assert len(rows["none-control-seed0"]["curve"]) == 1
    assert rows["none-seed0"]["curve"][-1]["step"] == 2 and rows["plain-seed0"]["curve"][-1]["tokens"] >= 600
    found = json.loads((tmp_path / "out" / "methods.json").read_text())
    assert found["diverged"] == ["none-seed0", "none-control-seed0"]
    assert found["tables"][2]["at"] == min(
        row["curve"][-1]["seconds"] for row in rows.values() if "diverged" not in row
    )
    assert "Diverged, and counted by their last evaluation: none-seed0" in (tmp_path / "out" / "table.md").read_text()


def test_what_another_command_made_is_refused(file: Path, compared: Path, tmp_path: Path) -> None:
    plan = read(file.read_text().replace("copy --from", "copy --of"), tmp_path)
    with pytest.raises(UserError, match=r"own0: made by another command than the file has now \(copy --from"):
        run_comparison(plan, compared, copying, train_more=False)


@pytest.mark.slow
def test_a_larger_budget_goes_on_with_the_same_runs(file: Path, compared: Path, tmp_path: Path) -> None:
    small = read_comparison(file, [0], [300])
    run_comparison(small, tmp_path / "out", copying)
    run_comparison(read_comparison(file, [0]), tmp_path / "out", copying)
    found, expected = (
        [{**row, "curve": row["curve"][-1]["em"]} for row in stored(at / "rows.jsonl")]
        for at in (tmp_path / "out", compared)
    )
    assert [(row["name"], row["steps"], row["curve"]) for row in found] == [
        (row["name"], row["steps"], row["curve"]) for row in expected if row["seed"] == 0
    ]


def test_a_run_that_ends_before_its_budget_is_refused(file: Path, tmp_path: Path) -> None:
    plan = read_comparison(file, [0], None, ["run.steps=1"])
    with pytest.raises(
        UserError, match=r"ended after run.steps = 1 with .* below the largest of budgets, 600; set a larger"
    ):
        run_comparison(plan, tmp_path / "out", copying)


def test_nothing_finished_is_no_comparison(file: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run is finished"):
        run_comparison(read_comparison(file), tmp_path / "out", copying, train_more=False)


# --- statistics


@pytest.mark.parametrize("values", [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0], [0.25, 1.0], [0.0]])
def test_packed_values_are_read_back(values: list[float]) -> None:
    assert unpacked(packed(values)) == values


def test_a_curve_is_linear_between_evaluations() -> None:
    curve = [{"tokens": tokens, "em": em} for tokens, em in ((0, 0.2), (100, 0.4), (100, 0.5), (300, 0.9))]

    def at(tokens: float) -> float:
        return between(curve, "tokens", tokens, lambda point: [point["em"]])[0]

    found = [at(tokens) for tokens in (0, 50, 100, 200, 300, 400)]
    assert found == pytest.approx([0.2, 0.3, 0.4, 0.7, 0.9, 0.9])


def made_up(effects: dict[str, Sequence[float]], control: float, questions: int = 200) -> list[dict[str, Any]]:
    """Return rows of methods with these shares of right answers, one per seed, and of controls with one share."""
    rows = []
    for method, shares in effects.items():
        for seed, share in enumerate(shares):
            for is_control, right in ((False, share), (True, control)):
                values = [1.0] * round(right * questions) + [0.0] * (questions - round(right * questions))
                random.Random(f"{seed}").shuffle(values)
                before, behind = (
                    {"step": n, "em": sum(v) / questions, "searches": 1.0, "questions": packed(v)}
                    for n, v in ((0, [0.0] * questions), (9, values))
                )
                curve = [before | {"tokens": 0, "seconds": 0.0}, behind | {"tokens": 1000, "seconds": 9.0}]
                run = {"condition": "", "method": method, "control": is_control, "seed": seed, "commit": "c0ffee"}
                rows.append(run | {"curve": curve})
    return rows


def test_what_is_claimed_and_what_is_not(tmp_path: Path) -> None:
    """Eight seeds: a method far above the baseline on all, one above by less than is detectable, and the baseline."""
    base = [0.50, 0.54, 0.46, 0.52, 0.48, 0.55, 0.45, 0.50]
    effects = {
        "plain": base,
        "above": [share + gap for share, gap in zip(base, (0.3, 0.26, 0.34, 0.3, 0.3, 0.25, 0.35, 0.3), strict=True)],
        "same": [share + gap for share, gap in zip(base, (0.1, -0.1, 0.05, -0.05, 0.1, -0.08, 0.0, 0.01), strict=True)],
    }
    text = HEAD.format(recipe="r.toml").replace("[0, 1]", str(list(range(8)))).replace("[300, 600]", "[1000]")
    plan = read(text.replace("none = ['grpo.scale=\"none\"']", "above = []\nsame = []"), tmp_path)
    found = analysis(plan, made_up(effects, 0.2))
    (table, _) = found["tables"]
    lines = {line["method"]: line for line in table["lines"] if not line["control"]}
    assert "baseline" not in lines["plain"]
    above, same = lines["above"]["baseline"], lines["same"]["baseline"]
    assert above["claimed"] and above["difference"] == pytest.approx(0.3)
    assert above["p"] == pytest.approx(2 / 2**8) and above["holm"] == pytest.approx(2 * above["p"])
    assert above["mde"] == pytest.approx(minimum_detectable_effect(above["gaps"]))
    assert above["interval"][0] < above["student"][0] < 0.3 < above["student"][1] < above["interval"][1]
    assert not same["claimed"] and abs(same["difference"]) < same["mde"]
    assert all(line["own control"]["claimed"] for line in lines.values())
    text = markdown(plan, found)
    assert "- above is above plain by 0.300 (Holm's p 0.0156)." in text
    about = f"Holm's p {same['holm']:.3g}, MDE {same['mde']:.3f}"
    assert f"- same - plain: +0.004, no difference shown ({about})." in text
    tokens, seconds = text.split("## 9 seconds")
    assert tokens.startswith("48 of 48 runs, of c0ffee.") and "- above" not in seconds
    assert "With 8 seeds no two-sided p is below 0.00781 before Holm's correction." in text
    # A difference that is planned counts in the correction before its runs are finished.
    (early, _) = analysis(plan, made_up({name: effects[name] for name in ("plain", "above")}, 0.2))["tables"]
    (line,) = [one for one in early["lines"] if one["method"] == "above" and not one["control"]]
    assert line["baseline"]["holm"] == pytest.approx(2 * line["baseline"]["p"])
    assert line["own control"]["holm"] == pytest.approx(3 * line["own control"]["p"])


def test_a_difference_below_the_minimum_detectable_effect_is_not_claimed(tmp_path: Path) -> None:
    """Eleven gaps of the same sign have a p of .001, but a larger spread than their mean."""
    gaps = (0.005, 0.005, 0.005, 0.005, 0.005, 0.005, 0.005, 0.005, 0.3, 0.005, 0.005)
    text = HEAD.format(recipe="r.toml").replace("[0, 1]", str(list(range(11)))).replace("[300, 600]", "[1000]")
    found = analysis(read(text, tmp_path), made_up({"plain": [0.4] * 11, "none": [0.4 + gap for gap in gaps]}, 0.4))
    line = next(line for line in found["tables"][0]["lines"] if line["method"] == "none")
    assert line["baseline"]["holm"] < 0.05 and abs(line["baseline"]["difference"]) < line["baseline"]["mde"]
    assert not line["baseline"]["claimed"]


def test_one_seed_says_nothing_of_another(tmp_path: Path) -> None:
    text = HEAD.format(recipe="r.toml").replace("[0, 1]", "[0]").replace("[300, 600]", "[1000]")
    plan = read(text, tmp_path)
    found = analysis(plan, made_up({"plain": [0.4], "none": [0.9]}, 0.1))
    assert "none - plain: +0.500; 1 seed can support no claim" in markdown(plan, found)
    assert not any(line.get("baseline", {}).get("claimed") for line in found["tables"][0]["lines"])


def test_a_table_without_controls_has_no_columns_of_them(tmp_path: Path) -> None:
    text = HEAD.format(recipe="r.toml").replace("[300, 600]", "[1000]")
    rows = made_up({"plain": [0.4, 0.5], "none": [0.9, 0.8]}, 0.1)
    alone = read(text.replace('control = ["grpo.shuffle_rewards=true"]', ""), tmp_path)
    without = markdown(alone, analysis(alone, [row for row in rows if not row["control"]]))
    plan = read(text, tmp_path)
    for page, count in ((without, 9), (markdown(plan, analysis(plan, rows)), 12)):
        table = [line for line in page.splitlines() if line.startswith("|")]
        assert {line.count("|") - 1 for line in table} == {count}
        assert ("its control" in page) is (count == 12)
