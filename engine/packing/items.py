"""From rewarded trajectories to the items of one optimiser step: each with its advantage, and the weight of its tokens.

    A[i]  = (R[i] - mean_G R) / max(std_G R, floor)                       a group's samples, see rewards/advantages.py
    w[i]  = 1 / (N |y_i|)  |  1 / sum_i |y_i|  |  1 / (N c)               "trajectory" | "token" | "constant"

N counts all trajectories of the optimiser step, those of groups without a signal included, and sums are over all of
them, on whichever rank they are. There is no loss mask to carry: y_i are the tokens that the policy sampled, which the
segments' sources say (Trajectory.policy_positions).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from thresher.engine.config.sections import GrpoSection
from thresher.engine.packing.batches import Item
from thresher.engine.protocol.trajectory import Trajectory
from thresher.rewards.advantages import group_advantages


@dataclass(frozen=True, slots=True)
class Totals:
    """What the weights of an optimiser step's tokens are shares of: its trajectories, and their sampled tokens."""

    trajectories: int
    tokens: int


def totals_of(trajectories: Sequence[Trajectory]) -> Totals:
    """Those of an optimiser step that has these trajectories and no other."""
    return Totals(len(trajectories), sum(len(trajectory.policy_positions()) for trajectory in trajectories))


def advantages(rewards: Sequence[float], groups: Sequence[int], grpo: GrpoSection) -> list[float]:
    """Each trajectory's advantage within its group (members may lie anywhere in the sequence)."""
    members: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        members.setdefault(group, []).append(number)
    result = [0.0] * len(rewards)
    for numbers in members.values():
        values = group_advantages(
            [rewards[n] for n in numbers], std_floor=grpo.std_floor, sample_std=grpo.sample_std, eps=grpo.std_eps
        )
        for n, value in zip(numbers, values, strict=True):
            result[n] = value
    return result


def make_items(
    trajectories: Sequence[Trajectory], advantage: Sequence[float], grpo: GrpoSection, totals: Totals | None = None
) -> list[Item]:
    """Trajectories with their advantages and the weight of each of their tokens, as the aggregation has it. totals: of
    the optimiser step; None: it has these trajectories alone."""
    positions = [trajectory.policy_positions() for trajectory in trajectories]
    totals = totals or Totals(len(trajectories), sum(map(len, positions)))
    weights = {
        "trajectory": lambda n: 1.0 / (totals.trajectories * len(positions[n])),
        "token": lambda n: 1.0 / totals.tokens,
        "constant": lambda n: 1.0 / (totals.trajectories * (grpo.aggregation_constant or 1.0)),
    }[grpo.aggregation]
    return [
        Item(
            ids=trajectory.ids(),
            positions=positions[n],
            old_logprobs=trajectory.policy_logprobs(),
            advantage=advantage[n],
            weight=weights(n),
            key=(trajectory.group, trajectory.sample),
        )
        for n, trajectory in enumerate(trajectories)
        if positions[n] and not (grpo.drop_zero_advantage and advantage[n] == 0.0)
    ]
