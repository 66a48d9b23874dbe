"""A run with a token budget: where it ends, what it leaves, and how it is resumed."""

import shutil
from pathlib import Path

import pytest
from train_cases import Make, assert_same_run, metrics, single_threaded, steps_of, train_killed, what_happened

from thresher.common.errors import UserError
from thresher.engine.config.recipe import Recipe, from_dict
from thresher.engine.reports.pages import RunRecords
from thresher.engine.reports.report import report_page
from thresher.engine.store.run_folder import RunFolder, expected_steps, tokens_spent
from thresher.engine.training.train import Progress, train

STEPS = 9  # more than any budget here allows


def spent_by_step(run: Path) -> list[int]:
    """Return the tokens that a run had computed after each of its steps."""
    records = steps_of(run)
    return [tokens_spent(records[: count + 1]) for count in range(len(records))]


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory: pytest.TempPathFactory, make_recipe: Make) -> Path:
    """Train a run of three steps without a budget, with an evaluation after every second step."""
    out = tmp_path_factory.mktemp("budget") / "run"
    with single_threaded():
        train(make_recipe(run={"steps": 3, "eval_every": 2}, optim={"schedule_steps": STEPS}), out)
    return out


def assert_same_steps(one: Path, other: Path) -> None:
    """Assert that two runs did the same, whatever ended them."""
    first, second = what_happened(one), what_happened(other)
    assert [key for key in first if key != "recipe" and first[key] != second.get(key)] == []


def with_budget(make_recipe: Make, budget: int) -> Recipe:
    keys = {"steps": STEPS, "eval_every": 2, "token_budget": budget}
    return make_recipe(run=keys, optim={"schedule_steps": STEPS})


def test_tokens_are_those_of_rollouts_and_updates(three_steps: Path) -> None:
    records = metrics(three_steps)
    steps = [record for record in records if "eval" not in record]
    whole = sum(one["prefilled_tokens"] + one["sampled_tokens"] + one["computed_tokens"] for one in steps)
    assert tokens_spent(records) == whole > 0


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("short", [0, 1])
def test_a_run_ends_with_the_step_that_reaches_its_budget(
    tmp_path: Path, make_recipe: Make, three_steps: Path, short: int
) -> None:
    """The budget is exactly the tokens of three steps, or one token more than those of two."""
    _, second, third = spent_by_step(three_steps)
    watched: list[Progress] = []
    summary = train(with_budget(make_recipe, second + 1 if short else third), tmp_path / "run", watch=watched.append)
    assert_same_steps(three_steps, tmp_path / "run")
    assert (summary["steps"], summary["tokens_spent"]) == (3, third)
    assert [one.step for one in watched if "eval" in one.record] == [0, 2, 3]
    assert "3 of 3 steps" in report_page(RunRecords.read(tmp_path / "run"))[0]
    assert watched[-1].steps == 3 and (tmp_path / "run" / "checkpoints" / "step_000003").is_dir()


@pytest.mark.slow
def test_a_killed_run_ends_where_it_would_have(tmp_path: Path, make_recipe: Make, three_steps: Path) -> None:
    recipe, out = with_budget(make_recipe, spent_by_step(three_steps)[-1]), tmp_path / "run"
    train_killed(recipe, out, 3)
    train(recipe, out, resume=True)
    assert_same_steps(three_steps, out)


def test_a_finished_run_goes_on_with_a_larger_budget_alone(
    tmp_path: Path, make_recipe: Make, three_steps: Path
) -> None:
    _, second, third = spent_by_step(three_steps)
    out = tmp_path / "run"
    train(with_budget(make_recipe, second), out)
    finished = shutil.copytree(out, tmp_path / "finished")
    train(with_budget(make_recipe, second), out, resume=True)
    assert [record["step"] for record in steps_of(out)] == [1, 2]
    assert_same_run(finished, out)
    train(with_budget(make_recipe, third), out, resume=True)
    assert_same_steps(three_steps, out)


def test_with_a_stale_cache_the_budget_is_the_runs_own(make_recipe: Make) -> None:
    """Its last step is saved, which empties the cache."""
    stale = {"partial": True, "stale_cache": True}
    one, other = (make_recipe(run={"token_budget": budget}, rollout=stale) for budget in (700, 2000))
    assert one.differences(other) == ["run.token_budget is 700, not 2000"]


def test_the_steps_to_come_follow_from_the_tokens_so_far(make_recipe: Make) -> None:
    run = with_budget(make_recipe, 1000).run
    assert [expected_steps(run, *done) for done in ((0, 0), (2, 400), (2, 1), (3, 1001))] == [STEPS, 5, STEPS, 3]
    assert expected_steps(make_recipe(run={"steps": 3}).run, 2, 10**9) == 3


@pytest.mark.parametrize(
    ("keys", "key"), [({"optim": {"schedule": "linear"}}, "schedule: "), ({"run": {"async": True}}, "token_budget: ")]
)
def test_what_a_budget_cannot_be_combined_with_is_refused(
    make_recipe: Make, keys: dict[str, dict[str, object]], key: str
) -> None:
    table = with_budget(make_recipe, 1000).to_dict()
    for section, more in keys.items():
        table[section] = table.get(section, {}) | more
    with pytest.raises(UserError, match=key):
        from_dict(Recipe, table, "recipe.toml")


@pytest.mark.slow
def test_a_run_watched_is_finished_by_its_budget(tmp_path: Path, make_recipe: Make, three_steps: Path) -> None:
    from thresher.engine.reports.watch import read_state

    out = tmp_path / "run"
    train(with_budget(make_recipe, spent_by_step(three_steps)[-1]), out)
    state = read_state(RunFolder(out).path)
    assert state.finished and state.says == "finished: step 3 of 3"
