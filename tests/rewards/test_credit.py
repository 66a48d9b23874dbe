"""Tests of finer advantages: each rule by hand, its errors, and its expectation by enumeration of small worlds."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from thresher.bench.studies.credit import (
    WORLDS,
    Batches,
    Policy,
    Rule,
    by_group,
    clipped,
    compare,
    enumerate_all,
    joined,
    of_groups,
    policies,
    tree_estimates,
    trees_of,
    true_gradient,
)
from thresher.common.errors import UserError
from thresher.rewards.advantages import advantages_by_group, group_advantages
from thresher.rewards.credit import (
    TURN_BASELINES,
    TurnBaseline,
    anchor_advantages,
    returns_to_go,
    tree_advantages,
    turn_advantages,
)

EXACT = 1e-12
BIASED = 1e-2  # of each of five policies of seed 0; the smallest is .022

# --- by hand


def flat(values: list[list[float]]) -> list[float]:
    return [value for own in values for value in own]


TURNS = [[1.0, 2.0], [3.0], [0.0, 1.0, 5.0]]
BY_BASELINE: list[tuple[TurnBaseline, list[list[float]]]] = [
    ("none", [[2, 2], [3], [1.75, 3.5, 5]]),
    ("leave_one_out", [[-0.375, 0.25], [1.125], [-0.75, 2.5, 5]]),
    ("reached", [[-0.375, -1.5], [1.125], [-0.75, 1.5, 5]]),
    ("whole", [[-0.375, -0.375], [1.125], [-0.75, 1, 2.5]]),
    ("turn_index", [[-0.25, -0.75], [0.75], [-0.5, 0.75, 0]]),
    ("turn_rewards", [[-1 / 12, 0.5], [5 / 3], [-19 / 12, -0.5, 0]]),
]


@pytest.mark.parametrize(("baseline", "expected"), BY_BASELINE)
def test_turns_by_hand(baseline: TurnBaseline, expected: list[list[float]]) -> None:
    found = turn_advantages(TURNS, gamma=0.5, baseline=baseline)
    assert [len(own) for own in found] == [2, 1, 3]
    assert flat(found) == pytest.approx(flat(expected))
    alone = turn_advantages([[1.0, 2.0]], baseline=baseline)
    assert alone == ([[3.0, 2.0]] if baseline == "none" else [[0.0, 0.0]])


def test_every_baseline_of_turns_is_here() -> None:
    assert {name for name, _ in BY_BASELINE} == set(TURN_BASELINES)
    assert returns_to_go([True, 2]) == [3.0, 2.0] and returns_to_go([1, 2, 4], 0) == [1.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[1.5, 2.5, 2.5], [-1.5, -2.5]]),
        ({"baseline": "group"}, [[0.75, 0.25, 1.25], [-0.75, -1.25]]),
        ({"baseline": "group", "std_floor": 0.0}, [[3, 1, 3], [-3, -3]]),
        ({"baseline": "group", "std_floor": 1.0}, [[0.75, 0.25, 1.25], [-0.75, -1.25]]),
        ({"baseline": "group", "std_floor": 0.0, "eps": 0.25}, [[1.5, 0.5, 11 / 6], [-1.5, -11 / 6]]),
        (
            {"baseline": "group", "std_floor": 0.0, "sample_std": True},
            [[value / 2**0.5 for value in own] for own in ([3, 1, 3], [-3, -3])],
        ),
    ],
)
def test_anchor_states_by_hand(options: dict[str, Any], expected: list[list[float]]) -> None:
    states = [["start", "alone", "met"], ["start", "met"]]
    found = anchor_advantages([[0, 0, 1], [0.5, 0]], states, omega=2, **options)
    assert flat(found) == pytest.approx(flat(expected)) and [len(own) for own in found] == [3, 2]


def test_a_trajectorys_own_second_visit_is_no_baseline_of_its_first() -> None:
    assert anchor_advantages([[0, 1], [3]], [["s", "s"], ["s"]]) == [[-4, -4], [4]]
    assert anchor_advantages([[0, 1]], [["s", "s"]]) == [[0, 0]]  # a group of one


PARENTS, LEAVES = [-1, 0, 0, 2, 2, -1], [None, 1.0, None, 0.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("options", "advantages", "weights"),
    [
        ({}, [1.25, 1.75, -0.5, -0.5, 1, -1.25], [0.5, 0.25, 0.25, 0.125, 0.125, 0.5]),
        ({"across": 0}, [0.625, 0.75, -0.75, -0.5, 0.5, -0.625], [0.5, 0.25, 0.25, 0.125, 0.125, 0.5]),
        ({"baseline": "group"}, [0.125, 1.125, -0.375, -0.875, 0.125, -0.375], [0.75, 0.25, 0.5, 0.25, 0.25, 0.25]),
        (
            {"baseline": "group", "across": 0, "std_floor": 0.0},
            [0, math.sqrt(1.5), -math.sqrt(1.5) / 2, -math.sqrt(1.5), 0, 0],
            [0.75, 0.25, 0.5, 0.25, 0.25, 0.25],
        ),
    ],
)
def test_trees_by_hand(options: dict[str, Any], advantages: list[float], weights: list[float]) -> None:
    found = tree_advantages(PARENTS, LEAVES, **options)
    assert found.advantages == pytest.approx(advantages) and found.weights == pytest.approx(weights)


def test_a_single_tree_has_what_its_siblings_say() -> None:
    found = tree_advantages([-1, 0, 0, 2], [None, 1.0, None, 0.0])
    assert found.advantages == [0, 1, -1, 0] and found.weights == [1, 0.5, 0.5, 0.5]


REWARDS, GROUPS = [1.0, 0.0, 4.0, 0.0, 2.0, 5.0], [7, 3, 7, 3, 7, 9]


@pytest.mark.parametrize(
    ("baseline", "scale", "expected"),
    [
        ("group", "none", [-4 / 3, 0, 5 / 3, 0, -1 / 3, 0]),
        ("leave_one_out", "none", [-2, 0, 2.5, 0, -0.5, 0]),
        ("batch", "none", [-1, -2, 2, -2, 0, 3]),
        ("none", "none", REWARDS),
        (
            "leave_one_out",
            "group",
            [-2 / math.sqrt(14 / 9), 0, 2.5 / math.sqrt(14 / 9), 0, -0.5 / math.sqrt(14 / 9), 0],
        ),
        ("group", "batch", [value / math.sqrt(14 / 18) for value in (-4 / 3, 0, 5 / 3, 0, -1 / 3, 0)]),
        ("leave_one_out", "batch", [value / math.sqrt(1.75) for value in (-2, 0, 2.5, 0, -0.5, 0)]),
        ("batch", "batch", [value / math.sqrt(22 / 6) for value in (-1, -2, 2, -2, 0, 3)]),
    ],
)
def test_baselines_and_scales_by_hand(baseline: Any, scale: Any, expected: list[float]) -> None:
    found = advantages_by_group(REWARDS, GROUPS, baseline=baseline, scale=scale, std_floor=0.1)
    assert found == pytest.approx(expected)


def test_todays_calls_keep_their_bits() -> None:
    generator = np.random.default_rng(5)
    rewards, groups = generator.random(60).tolist(), generator.integers(0, 9, 60).tolist()
    for options in ({}, {"std_floor": 0.0, "sample_std": True, "eps": 1e-4}):
        found = advantages_by_group(rewards, groups, **options)
        for group in set(groups):
            own = [reward for reward, there in zip(rewards, groups, strict=True) if there == group]
            mean = math.fsum(own) / len(own)
            std = math.sqrt(math.fsum((r - mean) ** 2 for r in own) / (len(own) - options.get("sample_std", False)))
            divisor = max(std, options.get("std_floor", 0.1)) + options.get("eps", 0.0)
            expected = [(r - mean) / divisor for r in own]
            assert [a for a, there in zip(found, groups, strict=True) if there == group] == expected
            assert group_advantages(own, **options) == expected


def test_a_batch_of_equal_rewards_has_exactly_zero() -> None:
    for baseline in ("group", "leave_one_out", "batch"):
        for scale in ("batch", "none"):
            found = advantages_by_group([0.1] * 7, [0] * 7, baseline=baseline, scale=scale, std_floor=0.0)  # type: ignore[arg-type]
            assert found == [0.0] * 7
    assert advantages_by_group([], [], baseline="batch", scale="batch") == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: turn_advantages([]), "without trajectories"),
        (lambda: turn_advantages([[1.0], []]), "at least one reward"),
        (lambda: turn_advantages([[1.0], [math.nan]]), "reward 0 of the group is nan"),
        (lambda: turn_advantages([[1.0]], gamma=1.1), "gamma is 1.1: expected a number from 0 to 1"),
        (lambda: turn_advantages([[1.0]], baseline="turn"), "baseline is 'turn': expected one of leave_one_out, "),  # type: ignore[arg-type]
        (lambda: anchor_advantages([[1.0, 2.0]], [["s"]]), r"states have \[1\] turns and rewards \[2\]"),
        (lambda: anchor_advantages([[1.0]], [["s"]], omega=math.inf), "omega is inf"),
        (lambda: anchor_advantages([[1.0]], [["s"]], std_floor=0.1), "a std_floor only with group"),
        (
            lambda: anchor_advantages([[1.0]], [["s"]], baseline="group", std_floor=-1),
            "must be numbers and not negative",
        ),
        (lambda: tree_advantages([], []), "0 parents and 0 rewards"),
        (lambda: tree_advantages([-1], [1.0, 2.0]), "1 parents and 2 rewards"),
        (lambda: tree_advantages([0], [1.0]), "parent 0 is 0: expected the number of an earlier node, or -1"),
        (lambda: tree_advantages([-1], [None]), "reward 0 is None: expected a finite number because it is a leaf"),
        (lambda: tree_advantages([-1, 0], [1.0, 1.0]), "reward 0 is 1.0: expected None because it has children"),
        (lambda: tree_advantages([-1], [1.0], across=math.nan), "across is nan"),
        (lambda: advantages_by_group([1.0], [0], baseline="none", scale="group"), "none with scale none"),
        (lambda: advantages_by_group([1.0], [0], baseline="mean"), "baseline 'mean' with scale 'group': expected"),  # type: ignore[arg-type]
        (lambda: advantages_by_group([math.inf], [0], baseline="none", scale="none"), "reward 0 of the group is inf"),
    ],
)
def test_what_cannot_be_right_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()


# --- by enumeration


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return enumerate_all(5)


def test_rules_are_what_they_are_said_to_be(rows: list[dict[str, Any]]) -> None:
    assert len(rows) == 28 and [row["rule"] for row in rows if row["finding"] != row["expected"]] == []
    assert {row["expected"] for row in rows} == {"exact", "scaled", "biased"}
    for row in rows:
        first = first_setting(row)
        for figures in row["settings"].values() if row["expected"] != "biased" else [first]:
            assert figures["direction"]["largest"] < EXACT or row["expected"] == "biased", row["rule"]
            assert (figures["bias"]["largest"] < EXACT) == (row["expected"] == "exact"), row["rule"]
        if row["expected"] == "biased":
            assert first["direction"]["smallest"] > BIASED, row["rule"]


@pytest.mark.parametrize(
    ("rule", "scales"),
    [
        ("group mean (Dr. GRPO)", [1 / 2, 1 / 2, 2 / 3]),
        ("batch mean", [3 / 4, 1 / 2, 2 / 3]),
        ("anchor state, leave-one-out", [2, 2, 2]),
        ("tree, leave-one-out", [2]),
    ],
)
def test_a_multiple_is_the_one_that_is_documented(rows: list[dict[str, Any]], rule: str, scales: list[float]) -> None:
    settings = next(row["settings"] for row in rows if row["rule"] == rule)
    found = [figures["scale"][part] for figures in settings.values() for part in ("smallest", "largest")]
    assert found == pytest.approx([scale for scale in scales for _ in range(2)], abs=EXACT)


def test_a_baseline_saves_variance_and_a_turns_own_return_more(rows: list[dict[str, Any]]) -> None:
    settings = {row["rule"]: row["settings"]["one prompt, groups of 3"] for row in rows if "tree" not in row["rule"]}
    names = ("REINFORCE, no baseline", "leave-one-out (RLOO)", "turn, leave-one-out")
    variances = [settings[name]["variance"]["median"] for name in names]
    assert variances == sorted(variances, reverse=True) and len(set(variances)) == 3


def test_no_two_biased_rules_are_one_rule(rows: list[dict[str, Any]]) -> None:
    """Otherwise a rule with a missing ingredient could pass as biased, because the rest is biased too."""
    biased = [row for row in rows if row["expected"] == "biased"]
    found = {tuple(round(one[key]["median"], 9) for key in ("bias", "scale")) for one in map(first_setting, biased)}
    assert len(biased) == 17 and len(found) == 17


def first_setting(row: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(iter(row["settings"].values()))
    return found


def test_weights_and_clip_by_hand() -> None:
    batches, (policy, old) = Batches(WORLDS, 2), policies(1, seed=2)[0]
    advantages_BNK = batches.advantages(by_group)
    equal = batches.members_BN.tolist().index([0, 0, 7, 10])  # a group without a signal; lengths 1, 1, 1, 3
    expected = {
        (("weight", "constant"),): [1 / 4] * 4,
        (("weight", "trajectory"),): [1 / 4, 1 / 4, 1 / 4, 1 / 12],
        (("weight", "token"),): [1 / 6] * 4,
        (("dropped", "counted"),): [0, 0, 1 / 4, 1 / 4],
        (("dropped", "uncounted"),): [0, 0, 1 / 2, 1 / 2],
    }
    for options, weights in expected.items():
        rule = Rule(name="", expected="", **dict(options))
        assert batches.weights(rule, advantages_BNK)[equal].tolist() == pytest.approx(weights)
    redrawn = batches.estimates(Rule(name="", expected="", dropped="redrawn"), advantages_BNK, policy, old)
    assert redrawn.probabilities_B[equal] == 0 and redrawn.probabilities_B.sum() == pytest.approx(1, abs=1e-13)
    plain = batches.estimates(Rule(name="", expected=""), advantages_BNK, policy, old)
    assert redrawn.turns_B.min() == redrawn.turns_B.max() > plain.probabilities_B @ plain.turns_B

    advantages_R, ratios_R = np.array([1.0, 1, 1, -1, -1, -1]), np.array([0.5, 1.1, 1.5, 0.5, 0.9, 1.5])
    shape = (1, 2, 3)
    args = advantages_R.reshape(shape), np.log(ratios_R).reshape(shape), np.zeros(shape)
    assert clipped(*args, None).reshape(-1) == pytest.approx(advantages_R * ratios_R)
    assert clipped(*args, 0.2).reshape(-1) == pytest.approx([0.5, 1.1, 0, 0, -0.9, -1.5])


def test_the_truth_is_autograds() -> None:
    policy, _ = policies(1, seed=3)[0]
    logits_P = torch.zeros(len(next(iter(policy.scores.values()))), dtype=torch.float64, requires_grad=True)
    at, pi = 0, {}
    with torch.no_grad():
        for state, actions in (item for world in WORLDS for item in world.items()):
            for action in range(len(actions)):
                logits_P[at + action] = policy.logprobs[state, action]
            at += len(actions)
    at = 0
    for state, actions in (item for world in WORLDS for item in world.items()):
        pi[state] = torch.softmax(logits_P[at : at + len(actions)], 0)
        at += len(actions)

    def value(world: Any, state: str) -> Any:
        """V(s) = sum_a pi(a|s) (r + V(s')), which needs no enumeration of trajectories."""
        return sum(
            pi[state][action] * (reward + (0.0 if following is None else value(world, following)))
            for action, (reward, following) in enumerate(world[state])
        )

    (sum(value(world, next(iter(world))) for world in WORLDS) / 2).backward()
    assert logits_P.grad is not None
    assert true_gradient(WORLDS, policy) == pytest.approx(logits_P.grad.numpy(), abs=1e-14)


def test_probabilities_are_of_all_there_is() -> None:
    policy, old = policies(1, seed=1)[0]
    for batches in (Batches(WORLDS, 2), Batches(WORLDS[:1], 3)):
        assert len(batches.members_BN) == (784 if len(batches.of_world) == 2 else 343)
        advantages_BNK = batches.advantages(by_group)
        for rule in (Rule(name="", expected=""), Rule(name="", expected="", ratio="token")):
            found = batches.estimates(rule, advantages_BNK, policy, old)
            assert found.probabilities_B.sum() == pytest.approx(1, abs=1e-13)
    forests = [[joined((one, other)) for one in trees_of(world) for other in trees_of(world)] for world in WORLDS]
    assert [len(own) for own in forests] == [19**2, 10**2]
    assert tree_estimates(Rule(name="", expected=""), forests, policy).probabilities_B.sum() == pytest.approx(
        1, abs=1e-13
    )


@pytest.mark.parametrize(("cost", "prize"), [(0.3, 1.0), (-0.1, 1.0)])
def test_rewards_less_their_index_mean_ignore_what_going_on_brings(cost: float, prize: float) -> None:
    """The closed form of a choice to stop, or to go on, for `cost`, to a certain `prize`: with groups of 2 the expected
    gradient is p (1 - p) cost / 2, the true one p (1 - p) (cost + prize). A search that costs a little and always pays
    is discouraged."""
    world = {"ask": ((0.0, None), (cost, "read")), "read": ((prize, None),)}
    batches, policy = Batches([world], 2), Policy.of([world], np.array([0.0, math.log(3), 0.0]))  # p = 3 / 4
    naive = Rule(name="", expected="")
    for baseline, scale in (("turn_rewards", cost / (2 * (cost + prize))), ("leave_one_out", 1.0)):

        def turns(group: Any, baseline: Any = baseline) -> list[list[float]]:
            return turn_advantages([one.rewards for one in group], baseline=baseline)

        advantages_BNK = batches.advantages(lambda own, groups, rule=turns: of_groups(own, groups, rule))
        found = compare(batches.estimates(naive, advantages_BNK, policy, policy), true_gradient([world], policy))
        assert found.scale == pytest.approx(scale, abs=EXACT) and found.direction < 1e-10
    assert true_gradient([world], policy) == pytest.approx([-3 / 16 * (cost + prize), 3 / 16 * (cost + prize), 0])
