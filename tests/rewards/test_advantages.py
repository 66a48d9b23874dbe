"""Tests of group advantages: cases worked out by hand, and the identities that hold for any group."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thresher.rewards import UserError, group_advantages

ROOT_HALF = math.sqrt(0.5)

BY_HAND = [
    # rewards, options, advantages
    ([0.49, 0.51], {"std_floor": 0.0}, [-1.0, 1.0]),
    ([0.49, 0.51], {"std_floor": 0.1}, [-0.1, 0.1]),
    ([0.49, 0.51], {}, [-0.1, 0.1]),
    ([0.49, 0.51], {"std_floor": 0.1, "eps": 0.1}, [-0.05, 0.05]),  # eps is added to the floor as well
    ([0.0, 1.0], {}, [-1.0, 1.0]),
    ([0.0, 1.0], {"sample_std": True, "std_floor": 0.0}, [-ROOT_HALF, ROOT_HALF]),
    (
        [0.0, 1.0],
        {"sample_std": True, "std_floor": 0.0, "eps": 1e-4},
        [-0.5 / (ROOT_HALF + 1e-4), 0.5 / (ROOT_HALF + 1e-4)],
    ),
    ([1, 0, 0, 0, 0], {}, [2.0, -0.5, -0.5, -0.5, -0.5]),
    ([0.1, 0, 0, 0, 0], {}, [0.8, -0.2, -0.2, -0.2, -0.2]),  # std .04: the floor keeps a single .1 small
    ([0.1, 0, 0, 0, 0], {"std_floor": 0.0}, [2.0, -0.5, -0.5, -0.5, -0.5]),
    ([True, False], {}, [1.0, -1.0]),
    ([-13.0, 13.0], {}, [-1.0, 1.0]),
]


@pytest.mark.parametrize(("rewards", "options", "expected"), BY_HAND)
def test_by_hand(rewards: list[float], options: dict, expected: list[float]) -> None:
    assert group_advantages(rewards, **options) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("options", [{}, {"std_floor": 0.0}, {"std_floor": 0.0, "sample_std": True, "eps": 1e-4}])
def test_equal_rewards_give_exactly_zero(options: dict) -> None:
    for rewards in ([0.1] * 7, [0.1] * 3, [1 / 3] * 11, [13.0], [0.0], [0.7] * 10, [-2.3] * 6, [1e-300] * 5):
        assert group_advantages(rewards, **options) == [0.0] * len(rewards)


def test_rewards_that_differ_by_rounding_are_equal() -> None:
    assert 0.1 + 0.2 != 0.3
    assert group_advantages([0.1 + 0.2, 0.3], std_floor=0.0) == [0.0, 0.0]
    assert group_advantages([0.0, 5e-324], std_floor=0.0) == [0.0, 0.0]
    assert group_advantages([0.3, 0.3 + 1e-9], std_floor=0.0) == pytest.approx([-1.0, 1.0])
    # The last bit of a reward of a million is 1e-10: the rounding threshold grows with the rewards.
    assert group_advantages([1e6, math.nextafter(1e6, 2e6)], std_floor=0.0) == [0.0, 0.0]


GROUPS = st.lists(st.floats(-20, 20).map(lambda x: round(x, 6)), min_size=1, max_size=16)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(GROUPS, st.booleans(), st.sampled_from([0.0, 0.1]))
def test_identities_of_any_group(rewards: list[float], sample_std: bool, std_floor: float) -> None:
    def of(group: list[float]) -> list[float]:
        return group_advantages(group, std_floor=std_floor, sample_std=sample_std)

    advantages = of(rewards)
    assert math.fsum(advantages) == pytest.approx(0, abs=1e-6)
    assert of([reward + 1 for reward in rewards]) == pytest.approx(advantages, abs=1e-6)
    squares = math.fsum(a * a for a in advantages)
    most = len(rewards) - sample_std
    assert squares <= most * (1 + 1e-9)  # bound: of n deviations by their own spread; a floor makes it less
    for a, r in zip(advantages, rewards, strict=True):
        assert a == 0 or math.copysign(1, a) == math.copysign(1, r - math.fsum(rewards) / len(rewards))
    # A member's advantage does not depend on its place, not even in the last bit.
    order = list(range(len(rewards)))
    random.Random(0).shuffle(order)
    assert of([rewards[i] for i in order]) == [advantages[i] for i in order]


def test_numpy_arrays_are_read_too() -> None:
    numpy = pytest.importorskip("numpy")
    advantages = group_advantages(numpy.array([0.0, 1.0], dtype=numpy.float32))
    assert advantages == [-1.0, 1.0] and all(type(a) is float for a in advantages)


@pytest.mark.parametrize(
    ("rewards", "options", "message"),
    [
        ([], {}, "at least one reward"),
        ([0.0, math.nan], {}, "reward 1 of the group is nan"),
        ([math.inf, 0.0], {}, "reward 0 of the group is inf"),
        ([0.0, 1.0], {"std_floor": -0.1}, "negative"),
        ([0.0, 1.0], {"eps": -1e-4}, "negative"),
    ],
)
def test_what_cannot_be_right_is_refused(rewards: list[float], options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        group_advantages(rewards, **options)
