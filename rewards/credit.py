"""Advantages finer than one number per trajectory: of a turn, of a turn in a known state, of a node of a tree.

Trajectory i of a group has turns 1..K_i with rewards r_ik; an outcome reward is on the last turn. The return-to-go is

    G_ik = sum_{l=k}^{K_i} gamma^(l-k) r_il        and 0 for k > K_i

The policy gradient is E[sum_k grad log pi(turn k) G_ik]. A baseline b_ik may be subtracted from G_ik without bias if,
given the text before turn k, it does not depend on turn k: grad log pi has mean 0 there. The other trajectories do not
depend on turn k. Trajectory i's own later turns do, and so does K_i, which the policy chooses by stopping.

    baseline          b_ik                                                      the gradient in expectation
    "leave_one_out"   mean over j != i of G_jk, a stopped one counting 0        exact
    "reached"         the same over those j != i with K_j >= k; 0 for none      exact
    "whole"           mean over j != i of G_j1, for every turn                  exact
    "none"            0                                                         exact
    "turn_index"      mean over all j with K_j >= k, i too                      biased
    "turn_rewards"    sum_{l=k}^{K_i} gamma^(l-k) mean over j with K_j >= l     biased
                      of r_jl, i too

"turn_index" shrinks turn k by 1 - 1/n, where n trajectories reach it, so late turns count less than early ones.
"turn_rewards" normalises rewards by turn index and then sums them. The number of its terms is K_i, a result of the turn
from which it is subtracted, so it penalises continuing by the mean reward of later turns (verl issue #7244; MT-GRPO,
arXiv 2505.11821). A division by a standard deviation of the same returns biases each baseline and is left out. With
gamma < 1 none is the gradient of a discounted return, whose turn k would also be weighted by gamma^(k-1).

The functions are pure, floats in and out. docs/results/estimators.md enumerates the expectation of each rule.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from thresher.common.errors import UserError, as_number, as_whole, shown
from thresher.rewards.advantages import advantages_by_group, center, finite_rewards, group_advantages, less

TurnBaseline = Literal["leave_one_out", "reached", "whole", "none", "turn_index", "turn_rewards"]
TURN_BASELINES: tuple[str, ...] = get_args(TurnBaseline)
PairBaseline = Literal["leave_one_out", "group"]
PAIR_BASELINES: tuple[str, ...] = get_args(PairBaseline)


def returns_to_go(rewards: Sequence[float], gamma: float = 1.0) -> list[float]:
    """Return G of every turn of one trajectory. UserError for no turns, a reward that is not finite, gamma outside 0
    to 1."""
    factor = as_number(gamma)
    if factor is None or not 0 <= factor <= 1:
        raise UserError(f"gamma is {shown(gamma)}: expected a number from 0 to 1")
    found = finite_rewards(rewards)
    for k in range(len(found) - 2, -1, -1):
        found[k] += factor * found[k + 1]
    return found


def turn_advantages(
    rewards: Sequence[Sequence[float]], *, gamma: float = 1.0, baseline: TurnBaseline = "leave_one_out"
) -> list[list[float]]:
    """Return G_ik - b_ik of every turn of a group's trajectories.

    rewards: one per turn, for each trajectory. baseline: of TURN_BASELINES, see the top of this file. The advantages of
    a group of one are 0, except for baseline "none".
    """
    if baseline not in TURN_BASELINES:
        raise UserError(f"baseline is {shown(baseline)}: expected one of {', '.join(TURN_BASELINES)}")
    returns = _returns(rewards, gamma)
    if baseline == "none":
        return returns
    if len(returns) == 1:
        return [[0.0] * len(returns[0])]
    if baseline == "turn_rewards":
        by_turn = _by_turn([finite_rewards(own) for own in rewards])
        means = [math.fsum(there) / len(there) for there in by_turn]
        return [returns_to_go([less(r, b) for r, b in zip(own, means, strict=False)], gamma) for own in rewards]
    if baseline == "turn_index":
        means = [math.fsum(there) / len(there) for there in _by_turn(returns)]
        return [[less(g, b) for g, b in zip(own, means, strict=False)] for own in returns]
    return [
        [
            less(g, _others_mean(returns, i, 0 if baseline == "whole" else k, baseline == "reached"))
            for k, g in enumerate(own)
        ]
        for i, own in enumerate(returns)
    ]


def anchor_advantages(
    rewards: Sequence[Sequence[float]],
    states: Sequence[Sequence[Hashable]],
    *,
    gamma: float = 1.0,
    omega: float = 1.0,
    baseline: PairBaseline = "leave_one_out",
    std_floor: float | None = None,
    sample_std: bool = False,
    eps: float = 0.0,
) -> list[list[float]]:
    """Return A_i + omega A_ik of every turn: trajectory compared with the group, turn with all turns of its state.

    GiGPO (Feng et al. 2025, arXiv 2505.10978). Turns of the group that saw the same context, given as equal keys, form
    a step group. baseline "group" is the paper's: A_i = R_i - mean R, with R_i the sum of rewards, and A_ik = G_ik -
    mean of G over its step group, which is 0 for a turn alone in its state. With a std_floor both are divided by
    max(std, std_floor) + eps, of R and of the step group's G; std as in `group_advantages`. It is biased even without
    one: a turn is shrunk by 1 - 1/n, where n is the number of visits to its state.

    baseline "leave_one_out": the means are over the other trajectories of the group, and over their visits to the
    state. For a state that none of them visited, the mean is over their returns-to-go at this turn, a stopped one
    counting 0. In expectation this is 1 + omega times the policy gradient, exactly for gamma 1. It takes no std_floor.
    """
    _check_pair(baseline, std_floor, "omega", omega)
    returns = _returns(rewards, gamma)
    if [len(own) for own in states] != [len(own) for own in returns]:
        raise UserError(
            f"states have {[len(own) for own in states]} turns and rewards {[len(own) for own in returns]}: give "
            "a state for every turn"
        )
    totals = [math.fsum(own) for own in rewards]
    whole = advantages_by_group(
        totals,
        [0] * len(totals),
        baseline=baseline,
        scale="none" if std_floor is None else "group",
        std_floor=std_floor or 0.0,
        sample_std=sample_std,
        eps=eps,
    )
    visits: dict[Hashable, list[tuple[int, int]]] = {}
    for i, own in enumerate(states):
        for k, state in enumerate(own):
            visits.setdefault(state, []).append((i, k))
    result = [[0.0] * len(own) for own in returns]
    for places in visits.values():
        there = [returns[i][k] for i, k in places]
        if baseline == "group":
            steps = (
                center(there)
                if std_floor is None
                else group_advantages(there, std_floor=std_floor, sample_std=sample_std, eps=eps)
            )
        else:
            steps = []
            for (i, k), g in zip(places, there, strict=True):
                others = [value for (j, _), value in zip(places, there, strict=True) if j != i]
                steps.append(less(g, math.fsum(others) / len(others) if others else _others_mean(returns, i, k)))
        for (i, k), step in zip(places, steps, strict=True):
            result[i][k] = 0.0 if len(returns) == 1 else less(whole[i], -omega * step)
    return result


class TreeCredit(NamedTuple):
    """Advantage of each node, and its weight, the factor of the gradient of its log-prob in the sum."""

    advantages: list[float]
    weights: list[float]


def tree_advantages(
    parents: Sequence[int],
    rewards: Sequence[float | None],
    *,
    across: float = 1.0,
    baseline: PairBaseline = "leave_one_out",
    std_floor: float | None = None,
    sample_std: bool = False,
    eps: float = 0.0,
) -> TreeCredit:
    """Return advantage and weight of every node of a prompt's trees. A node is a turn, whose parent is the turn before
    it, or the prompt of a tree (parent -1), which may have several first turns and whose own advantage is not used.

    parents: for each node the number of an earlier node, or -1 for the first node of a tree. rewards: for a leaf the
    whole return of its trajectory; None elsewhere. A = (within its tree) + across * (across the trees):

    baseline "group" is Tree-GRPO's (Ji et al. 2025, arXiv 2509.21240): a leaf's trajectory is compared with all leaves
    of its tree and with all leaves of the prompt, each divided by max(std, std_floor) + eps if there is a std_floor
    (sample_std: of n - 1). A node has the mean of its leaves' advantages and the weight (its leaves) / (all leaves), as
    if each leaf were a separate trajectory. It is biased even without a std, because the number of leaves of a subtree
    depends on which samples stop.

    baseline "leave_one_out": v of a leaf is its reward, v of any other node the mean of its children's v. Within: v
    minus the mean v of the node's siblings; the siblings of a tree's first node are the other trees, and a node without
    siblings uses the mean over the other trees. Across: v minus the mean v of the other trees. The weight is the
    product of 1 / (siblings, including itself) from the prompt down. In expectation this is 1 + across times the policy
    gradient. In a single tree, nodes without siblings have 0 and the term across is 0. It takes no std_floor.
    """
    _check_pair(baseline, std_floor, "across", across)
    children = _children(parents, rewards)
    tops = [n for n, parent in enumerate(parents) if parent == -1]
    if baseline == "group":
        scale = None if std_floor is None else {"std_floor": std_floor, "sample_std": sample_std, "eps": eps}
        return _leaf_credit(children, tops, rewards, across, scale)
    values, weights, tree = [0.0] * len(parents), [0.0] * len(parents), list(range(len(parents)))
    for n in range(len(parents) - 1, -1, -1):
        own = rewards[n]
        values[n] = float(own) if own is not None else math.fsum(values[c] for c in children[n]) / len(children[n])
    advantages = []
    for n, parent in enumerate(parents):
        siblings = tops if parent == -1 else children[parent]
        tree[n] = n if parent == -1 else tree[parent]
        weights[n] = (1.0 if parent == -1 else weights[parent]) / len(siblings)
        trees = [top for top in tops if top != tree[n]]
        beyond = less(values[n], math.fsum(values[t] for t in trees) / len(trees)) if trees else 0.0
        within = beyond
        if len(siblings) > 1:
            within = less(values[n], math.fsum(values[s] for s in siblings if s != n) / (len(siblings) - 1))
        advantages.append(less(within, -across * beyond))
    return TreeCredit(advantages, weights)


def _check_pair(baseline: str, std_floor: float | None, name: str, factor: float) -> None:
    if baseline not in PAIR_BASELINES or (std_floor is not None and baseline != "group"):
        raise UserError(
            f"baseline is {shown(baseline)} with std_floor {shown(std_floor)}: expected "
            f"{' or '.join(PAIR_BASELINES)}, and a std_floor only with group"
        )
    if as_number(factor) is None:
        raise UserError(f"{name} is {shown(factor)}: expected a finite number")


def _leaf_credit(
    children: list[list[int]],
    tops: list[int],
    rewards: Sequence[float | None],
    across: float,
    scale: Mapping[str, Any] | None,
) -> TreeCredit:
    leaves: list[list[int]] = [[] for _ in children]  # leaves below each node; for a leaf, itself
    for n in range(len(children) - 1, -1, -1):
        leaves[n] = [leaf for c in children[n] for leaf in leaves[c]] if children[n] else [n]

    def compared(chosen: list[int]) -> dict[int, float]:
        own = [reward for n in chosen if (reward := rewards[n]) is not None]
        values = center(own) if scale is None else group_advantages(own, **scale)
        return dict(zip(chosen, values, strict=True))

    beyond = compared([leaf for top in tops for leaf in leaves[top]])
    within = {leaf: value for top in tops for leaf, value in compared(leaves[top]).items()}
    return TreeCredit(
        [less(math.fsum(within[leaf] + across * beyond[leaf] for leaf in own) / len(own), 0.0) for own in leaves],
        [len(own) / len(beyond) for own in leaves],
    )


def _children(parents: Sequence[int], rewards: Sequence[float | None]) -> list[list[int]]:
    """Return the children of every node. UserError unless the lists are trees with rewards at exactly the leaves."""
    if not parents or len(parents) != len(rewards):
        raise UserError(f"{len(parents)} parents and {len(rewards)} rewards: give one of each for every node")
    children: list[list[int]] = [[] for _ in parents]
    for n, parent in enumerate(parents):
        at = as_whole(parent)
        if at is None or not -1 <= at < n:
            raise UserError(f"parent {n} is {shown(parent)}: expected the number of an earlier node, or -1")
        if at >= 0:
            children[at].append(n)
    for n, reward in enumerate(rewards):
        if reward is not None if children[n] else as_number(reward) is None and not isinstance(reward, bool):
            expected = "None because it has children" if children[n] else "a finite number because it is a leaf"
            raise UserError(f"reward {n} is {shown(reward)}: expected {expected}")
    return children


def _returns(rewards: Sequence[Sequence[float]], gamma: float) -> list[list[float]]:
    if not rewards:
        raise UserError("a group without trajectories has no advantages: give at least one")
    return [returns_to_go(own, gamma) for own in rewards]


def _by_turn(values: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return for each turn the values of the trajectories that reach it."""
    return [[own[k] for own in values if len(own) > k] for k in range(max(map(len, values)))]


def _others_mean(returns: list[list[float]], i: int, k: int, reached: bool = False) -> float:
    """Return the mean of the others' returns-to-go at turn k, over all others or those that reach turn k."""
    there = [own[k] for j, own in enumerate(returns) if j != i and len(own) > k]
    number = len(there) if reached else len(returns) - 1
    return math.fsum(there) / number if number else 0.0
