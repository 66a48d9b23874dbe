"""A run that trains by trees: what it stores and counts, resumed and refilled runs, and a replay of its tools."""

from pathlib import Path
from typing import Any

import pytest
from browser import run_page
from train_cases import Killed, Make, assert_same_run, die_after, sampled, steps_of

from thresher.engine.reports.report import write_report
from thresher.engine.reports.token_view import policy_counts, write_token_view
from thresher.engine.store.token_stats import read_token_stats
from thresher.engine.training.train import train

TREES: dict[str, Any] = {
    "rollout": {"trees": 2, "tree_nodes": 2, "group_size": 6},
    "grpo": {"advantage": "tree", "aggregation": "token"},
    "run": {"steps": 2, "eval_every": None, "save_every": 1},
}


@pytest.fixture(scope="module")
def uninterrupted(make_recipe: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trees") / "run"
    train(make_recipe(**TREES), out)
    return out


def turns(record: dict[str, Any]) -> list[list[int]]:
    return [segment["ids"] for segment in record["segments"] if segment["source"] == "policy"]


def test_what_a_run_stores_and_counts(uninterrupted: Path) -> None:
    for step, counted in enumerate(steps_of(uninterrupted), 1):
        records = sampled(uninterrupted, step)
        forked = [one for one in records if "forked" in one]
        assert len(records) == 18 and len(forked) == counted["forks"] == 12
        inherited, written = 0, 0
        for group in range(3):
            own = records[6 * group : 6 * group + 6]
            assert [one["sample"] for one in own if "forked" in one] == [2, 3, 4, 5]
            for one in own:
                written += sum(map(len, turns(one)))
                if "forked" in one:
                    sample, count = one["forked"]
                    assert sample == (0 if one["sample"] < 4 else 1)
                    assert turns(one)[:count] == turns(own[sample])[:count] and count < len(turns(own[sample]))
                    inherited += sum(map(len, turns(one)[:count]))
        assert counted["inherited_share"] == pytest.approx(inherited / written)
        assert counted["leaf_tokens"] == pytest.approx((written - inherited) / 18)
        assert counted["loss_tokens"] == written - inherited
        path = uninterrupted / "trajectories" / f"step_{step:06d}.safetensors"
        stats = read_token_stats(path, *policy_counts(records))
        assert stats is not None
        for one, entry in zip(records, stats, strict=True):
            taken = sum(map(len, turns(one)[: one.get("forked", (0, 0))[1]]))
            values = entry.values["advantage"]
            assert (values[taken:] == values[taken:]).all() and (values[:taken] != values[:taken]).all()
            assert one["advantage"] == pytest.approx(float(values[taken:].mean()), abs=1e-6)
    assert any(record["inherited_share"] > 0 for record in steps_of(uninterrupted))


def test_a_resumed_run_has_the_bits_of_one_that_was_not_killed(
    make_recipe: Make, uninterrupted: Path, tmp_path: Path
) -> None:
    with pytest.raises(Killed):
        train(make_recipe(**TREES), tmp_path / "run", watch=die_after(1))
    train(make_recipe(**TREES), tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", uninterrupted)


def test_a_refill_grows_trees_too(make_recipe: Make, tmp_path: Path) -> None:
    refill = {
        "rollout": {"trees": 1, "tree_nodes": 1, "group_size": 2, "questions_per_step": 4},
        "grpo": TREES["grpo"] | {"refill": True, "refill_rounds": 3},
        "run": {"steps": 1, "eval_every": None, "seed": 0},
    }
    train(make_recipe(**refill), tmp_path / "run")
    (counted,) = steps_of(tmp_path / "run")
    assert counted["refill_rounds"] > 1 and counted["forks"] == 4 + counted["refilled_groups"] > 4
    assert sum("forked" in one for one in sampled(tmp_path / "run", 1)) == 4


@pytest.mark.slow
def test_the_report_names_trees_and_their_rule(uninterrupted: Path, tmp_path: Path) -> None:
    page = write_report(uninterrupted, tmp_path).read_text()
    assert "3 questions × 6 samples in 2 trees at temperature" in page and "], advantages by tree, KL" in page


def test_the_token_view_says_whose_a_turn_is(uninterrupted: Path, tmp_path: Path) -> None:
    page = write_token_view(uninterrupted, "1", tmp_path / "page.html").read_text()
    records = sampled(uninterrupted, 1)
    for group in range(3):
        forked = [one["forked"] for one in records[6 * group : 6 * group + 6] if "forked" in one]
        found = run_page(
            page,
            """
            const others = document.querySelectorAll(".seg.y.other");
            const titles = others.map((node) => node.attributes.get("title"));
            const heads = document.querySelectorAll(".sample header").map((node) => node.textContent);
            return { titles, heads };
            """,
            address=f"#g={group}&s=0&c=advantage&f=all",
        )
        assert found["titles"] == [f"written by sample {sample}" for sample, count in forked for _ in range(count)]
        heads = ["written by" in head and head.split("written by sample ")[1][0] for head in found["heads"]]
        assert heads == [False, False, *(str(sample) for sample, _ in forked)]
