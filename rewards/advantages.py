"""Group-relative advantages, as GRPO takes them: each reward against the mean of its own group.

    A_i = (R_i - mean(R)) / (max(std(R), std_floor) + eps)

A floor of .1 is EviOmni's and LEAR's; a recipe's is 1e-6 otherwise. Without a floor a group of {.49, .51} gets
advantages of -1 and +1, as a group of {0, 1} does; with .1 it gets -.1 and +.1. The deviation is the population's. A
group whose rewards are equal, so a group of one, has advantage 0 (verl gives a lone sample its raw reward).

Groups are the caller's numbers, never equal prompts, so that two copies of a prompt do not merge into one.
"""

import math
from collections.abc import Iterable, Sequence

from thresher.common.errors import UserError, as_number, shown

# Rewards are sums of a few parts, so equal ones may differ in their last bits (.1 + .2 and .3). Spreads up to
# this (times the largest reward, where that exceeds 1) are rounding; without a floor they would be blown up
# to advantages of +-1.
ROUNDING = 1e-12


def group_advantages(
    rewards: Sequence[float], *, std_floor: float = 0.1, sample_std: bool = False, eps: float = 0.0
) -> list[float]:
    """Return the advantages of one group, in the order of its rewards.

    Training passes the recipe's grpo.std_floor, sample_std and std_eps. `std_floor` 0 switches the floor off.
    `sample_std=True, std_floor=0, eps=1e-4` is ARENA's code (TRL's form). Sums are rounded once (fsum), so the order of
    a group does not change a bit. UserError for an empty group, a reward that is not finite, a negative floor or eps.
    """
    if any(number is None or number < 0 for number in (as_number(std_floor), as_number(eps))):
        raise UserError(f"std_floor and eps must be numbers and not negative, got {shown(std_floor)} and {shown(eps)}")
    if not isinstance(rewards, Iterable):
        raise UserError(f"rewards is {shown(rewards)}: give a list of finite numbers")
    given = list(rewards)
    found = [float(reward) if isinstance(reward, bool) else as_number(reward) for reward in given]
    if not found:
        raise UserError("a group without rewards has no advantages: give at least one reward")
    if None in found:
        i = found.index(None)
        raise UserError(f"reward {i} of the group is {shown(given[i])}: rewards must be finite numbers")
    rewards = [reward for reward in found if reward is not None]
    # Tested on the rewards, not on the deviation: the rounded mean of seven times .1 is not .1.
    if max(rewards) - min(rewards) <= ROUNDING * max(1.0, *map(abs, rewards)):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    squares = math.fsum((reward - mean) ** 2 for reward in rewards)
    std = math.sqrt(squares / (len(rewards) - (1 if sample_std else 0)))
    scale = max(std, std_floor) + eps
    return [(reward - mean) / scale for reward in rewards]


def advantages_by_group(
    rewards: Sequence[float],
    groups: Sequence[int],
    *,
    std_floor: float = 0.1,
    sample_std: bool = False,
    eps: float = 0.0,
) -> list[float]:
    """Return each reward's advantage within its group, as `group_advantages`; members may lie anywhere."""
    members: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        members.setdefault(group, []).append(number)
    result = [0.0] * len(rewards)
    for numbers in members.values():
        own = [rewards[n] for n in numbers]
        values = group_advantages(own, std_floor=std_floor, sample_std=sample_std, eps=eps)
        for n, value in zip(numbers, values, strict=True):
            result[n] = value
    return result
