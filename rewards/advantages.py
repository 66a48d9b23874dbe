"""Group-relative advantages, as in GRPO: each reward compared with the mean of its own group.

    A_i = (R_i - mean(R)) / (max(std(R), std_floor) + eps)

EviOmni and LEAR have a floor of .1; other recipes default to 1e-6. Without a floor a group of {.49, .51} gets
advantages of -1 and +1, as a group of {0, 1} does; with .1 it gets -.1 and +.1. The deviation is the population's. A
group whose rewards are equal, and thus a group of one, has advantage 0 (verl gives a lone sample its raw reward).

Groups are identified by the caller's numbers, not by equal prompts, so two copies of a prompt do not merge.

`advantages_by_group` also has other baselines b and scales s, A_i = (R_i - b_i) / s_i:

    baseline "group"          b = mean of the group            GRPO; Dr. GRPO with scale "none" (arXiv 2503.20783)
             "leave_one_out"  b = mean of the group's others   RLOO with scale "none" (arXiv 2402.14740)
             "batch"          b = mean of the batch            REINFORCE++ with scale "batch" (arXiv 2501.03262)
             "none"           b = 0                            REINFORCE
    scale    "group"          s = max(std of the group's R, std_floor) + eps
             "batch"          s = max(std of the batch's R - b, std_floor) + eps; with baseline "group" this is
                              REINFORCE++-baseline
             "none"           s = 1

Leave-one-out is the group's rule times n / (n - 1), since R_i - mean of the others = n / (n - 1) (R_i - mean). With
scale "none" every baseline gives an unbiased policy gradient: "leave_one_out" and "none" exactly, "group" and "batch"
times (n - 1) / n of the group or batch. A scale other than "none" is a statistic of the same rewards and biases the
gradient (docs/results/estimators.md). Papers average over tokens for "batch"; here each trajectory counts once.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from thresher.common.errors import UserError, as_number, shown

# Rewards are sums of a few parts, so equal ones may differ in their last bits (.1 + .2 and .3). Spreads up to
# this (times the largest reward, if that exceeds 1) are rounding; without a floor they would become advantages
# of +-1.
ROUNDING = 1e-12

Baseline = Literal["group", "leave_one_out", "batch", "none"]
Scale = Literal["group", "batch", "none"]
# A group or batch without spread is divided by its floor, so its rewards must be centred on its own mean.
SCALES: dict[Baseline, tuple[Scale, ...]] = {
    "group": ("group", "batch", "none"),
    "leave_one_out": ("group", "batch", "none"),
    "batch": ("batch", "none"),
    "none": ("none",),
}


def group_advantages(
    rewards: Sequence[float], *, std_floor: float = 0.1, sample_std: bool = False, eps: float = 0.0
) -> list[float]:
    """Return the advantages of one group, in the order of its rewards.

    Training passes the recipe's grpo.std_floor, sample_std and std_eps. `std_floor` 0 disables the floor.
    `sample_std=True, std_floor=0, eps=1e-4` is ARENA's code (TRL's form). Sums are rounded once (fsum), so the result
    does not depend on the order. UserError for an empty group, a reward that is not finite, a negative floor or eps.
    """
    _check_scale(std_floor, eps)
    found = finite_rewards(rewards)
    centred = center(found)
    if not any(centred):
        return centred
    scale = _deviation(centred, sample_std, std_floor) + eps
    return [value / scale for value in centred]


def advantages_by_group(
    rewards: Sequence[float],
    groups: Sequence[int],
    *,
    baseline: Baseline = "group",
    scale: Scale = "group",
    std_floor: float = 0.1,
    sample_std: bool = False,
    eps: float = 0.0,
) -> list[float]:
    """Return the advantage of each reward, by default within its group as in `group_advantages`.

    Members of a group need not be adjacent. baseline, scale: see the top of this file. A group of one has advantage 0
    with the baselines "leave_one_out" and "group". UserError as `group_advantages`, and for a scale that does not fit
    the baseline.
    """
    if scale not in SCALES.get(baseline, ()):
        fitting = "; ".join(f"{name} with scale {' or '.join(scales)}" for name, scales in SCALES.items())
        raise UserError(f"baseline {shown(baseline)} with scale {shown(scale)}: expected {fitting}")
    _check_scale(std_floor, eps)
    members: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        members.setdefault(group, []).append(number)
    result = [0.0] * len(rewards)
    for numbers in members.values():
        own = finite_rewards([rewards[n] for n in numbers])
        if baseline in ("batch", "none"):
            values = own
        elif scale == "group":
            values = group_advantages(own, std_floor=std_floor, sample_std=sample_std, eps=eps)
        else:
            values = center(own)
        if baseline == "leave_one_out" and len(own) > 1:
            values = [value * len(own) / (len(own) - 1) for value in values]
        for n, value in zip(numbers, values, strict=True):
            result[n] = value
    if baseline == "batch" and result:
        result = center(result)
    if scale == "batch" and any(result):
        # The mean of `result` is 0 with every baseline that allows this scale.
        divisor = _deviation(result, sample_std, std_floor) + eps
        result = [value / divisor for value in result]
    return result


def finite_rewards(rewards: Sequence[float]) -> list[float]:
    """Return the rewards of one group as floats. UserError for an empty group or a reward that is not finite."""
    if not isinstance(rewards, Iterable):
        raise UserError(f"rewards is {shown(rewards)}: give a list of finite numbers")
    given = list(rewards)
    found = [float(reward) if isinstance(reward, bool) else as_number(reward) for reward in given]
    if not found:
        raise UserError("a group without rewards has no advantages: give at least one reward")
    if None in found:
        i = found.index(None)
        raise UserError(f"reward {i} of the group is {shown(given[i])}: rewards must be finite numbers")
    return [reward for reward in found if reward is not None]


def center(rewards: Sequence[float]) -> list[float]:
    """Return the rewards minus their mean; exactly 0 if they differ only by rounding."""
    mean = math.fsum(rewards) / len(rewards)
    return [less(reward, mean) for reward in rewards]


def less(value: float, mean: float) -> float:
    """Return the difference; exactly 0 if it is only rounding: the rounded mean of seven times .1 is not .1."""
    difference = value - mean
    return 0.0 if abs(difference) <= ROUNDING * max(1.0, abs(value), abs(mean)) else difference


def _deviation(centred: Sequence[float], sample_std: bool, std_floor: float) -> float:
    squares = math.fsum(value**2 for value in centred)
    return max(math.sqrt(squares / (len(centred) - (1 if sample_std else 0))), std_floor)


def _check_scale(std_floor: float, eps: float) -> None:
    if any(number is None or number < 0 for number in (as_number(std_floor), as_number(eps))):
        raise UserError(f"std_floor and eps must be numbers and not negative, got {shown(std_floor)} and {shown(eps)}")
