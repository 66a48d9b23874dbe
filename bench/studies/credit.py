"""`thresher study credit`: which rules of credit give the policy gradient, and which give another direction.

Two prompts whose actions, rewards and stops are small enough that every trajectory, every batch of them and every
forest of shared prefixes is enumerated with its probability, in float64. A policy is a softmax over logits at each
state; paths share states, so that anchor states exist. For a rule the study computes

    g(batch)  = sum_ik w_ik c_ik A_ik grad log pi(a_ik | s_ik)      w, c: weight and ratio of the loss, A: the rule's
    mean      = sum_batches P(batch) g(batch)                       against the exact gradient of E[sum of rewards]
    bias      = |mean - truth| / |truth|
    scale     = <mean, truth> / |truth|^2                           the multiple of the truth that is nearest to mean
    direction = |mean - scale truth| / |scale truth|                the bias that no learning rate removes
    variance  = E|g - mean|^2 / |scale truth|^2
    turns     = mean number of sampled turns, including groups that are drawn again

Advantages are the product's own (rewards/advantages.py, rewards/credit.py), and so are ratio and clip
(kernels/objective.py). An action is one token.

    credit.json      each rule: the figures over all policies: smallest, quartiles, largest
    credit.png       direction and variance of each rule

Axes: B batches or forests, N trajectories or nodes of a batch, T trajectories of a prompt, K turns (padded), P logits.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from thresher.bench.harness import facts
from thresher.bench.studies.runs import check_out, write_json
from thresher.common import console
from thresher.kernels.objective import LossRows, LossSettings, surrogate_of
from thresher.rewards.advantages import advantages_by_group
from thresher.rewards.credit import TurnBaseline, anchor_advantages, tree_advantages, turn_advantages

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
# A prompt: state -> for each action its reward and the next state; None: the trajectory stops. "both" is reached by two
# paths. The prompt starts in the first state.
World = Mapping[str, Sequence[tuple[float, str | None]]]
WORLDS: tuple[World, ...] = (
    {
        "start": ((0.0, None), (0.2, "left"), (0.1, "right")),
        "left": ((1.0, None), (0.0, "both")),
        "right": ((0.0, None), (0.3, "both")),
        "both": ((0.0, None), (1.0, None)),
    },
    {
        "ask": ((0.5, None), (0.1, "read")),
        "read": ((0.0, None), (0.2, "read more")),
        "read more": ((0.0, None), (1.0, None)),
    },
)
DRAWS, SPREAD, SHIFT = 50, 1.0, 0.7  # policies; standard deviations of their logits, and of the step since sampling
FLOOR = 1e-6  # of a deviation: a recipe's default
CLIP = 0.2
EXACT = 1e-12
BATCHES: dict[str, tuple[int, int]] = {  # prompts, trajectories of each; the table shows the first setting of each rule
    "two prompts, groups of 2": (2, 2),
    "one prompt, groups of 2": (1, 2),
    "one prompt, groups of 3": (1, 3),
}
FORESTS = "two prompts, two trees each"


class Trajectory(NamedTuple):
    """One path through a world: a state, an action and a reward per turn."""

    states: tuple[str, ...]
    actions: tuple[int, ...]
    rewards: tuple[float, ...]


Advantages = Callable[[Sequence[Trajectory], Sequence[int]], list[list[float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule of credit and of the loss. expected: "exact", "scaled" or "biased", in the setting of two prompts.

    weight: one of packing.py's aggregations, with a constant of 1. dropped: groups without an advantage are left out,
    and N counts them ("counted") or does not ("uncounted"), or each is drawn again until it has one ("redrawn"). ratio:
    per "token", per "trajectory", or "one"; with a ratio, the batch is sampled by an older policy. tree: options of
    `tree_advantages`.
    """

    name: str
    expected: str
    advantages: Advantages | None = None  # None: those of trees
    weight: str = "constant"
    dropped: str | None = None
    ratio: str | None = None
    clip: float | None = None
    tree: Mapping[str, Any] = field(default_factory=dict)
    part: bool = False  # leave-one-out with one addition


def by_group(trajectories: Sequence[Trajectory], groups: Sequence[int], **options: Any) -> list[list[float]]:
    """Return trajectory-level advantages for every turn."""
    totals = [sum(one.rewards) for one in trajectories]
    found = advantages_by_group(totals, groups, std_floor=FLOOR, **options)
    return [[value] * len(one.rewards) for value, one in zip(found, trajectories, strict=True)]


def of_groups(
    trajectories: Sequence[Trajectory], groups: Sequence[int], rule: Callable[[list[Trajectory]], list[list[float]]]
) -> list[list[float]]:
    """Return the advantages of a rule that sees one group at a time; members of a group are adjacent."""
    found: list[list[float]] = []
    for _, members in itertools.groupby(range(len(groups)), groups.__getitem__):
        found += rule([trajectories[n] for n in members])
    return found


def _turns(baseline: TurnBaseline) -> Advantages:
    def rule(group: list[Trajectory]) -> list[list[float]]:
        return turn_advantages([one.rewards for one in group], baseline=baseline)

    return partial(of_groups, rule=rule)


def _anchors(**options: Any) -> Advantages:
    def rule(group: list[Trajectory]) -> list[list[float]]:
        return anchor_advantages([one.rewards for one in group], [one.states for one in group], **options)

    return partial(of_groups, rule=rule)


def rules() -> list[Rule]:
    """Return every rule, in the order of the table."""
    leave_one_out = partial(by_group, baseline="leave_one_out", scale="none")
    part = partial(Rule, advantages=leave_one_out, part=True)
    rows: list[tuple[str, str, Advantages]] = [
        ("REINFORCE, no baseline", "exact", partial(by_group, baseline="none", scale="none")),
        ("leave-one-out (RLOO)", "exact", leave_one_out),
        ("group mean (Dr. GRPO)", "scaled", partial(by_group, baseline="group", scale="none")),
        ("group mean and std (GRPO)", "biased", by_group),
        ("batch mean", "scaled", partial(by_group, baseline="batch", scale="none")),
        ("batch mean and std (REINFORCE++)", "biased", partial(by_group, baseline="batch", scale="batch")),
        ("group mean, batch std (R++-baseline)", "biased", partial(by_group, baseline="group", scale="batch")),
        ("turn, leave-one-out", "exact", _turns("leave_one_out")),
        ("turn, others that reached it", "exact", _turns("reached")),
        ("turn, others' whole returns", "exact", _turns("whole")),
        ("turn, mean of its index", "biased", _turns("turn_index")),
        ("turn, rewards less their index's mean", "biased", _turns("turn_rewards")),
        ("anchor state, leave-one-out", "scaled", _anchors()),
        ("anchor state, mean (GiGPO)", "biased", _anchors(baseline="group")),
        ("anchor state, mean and std (GiGPO)", "biased", _anchors(baseline="group", std_floor=FLOOR)),
    ]
    return [
        *(Rule(name=name, expected=expected, advantages=advantages) for name, expected, advantages in rows),
        Rule(name="tree, leave-one-out", expected="scaled"),
        Rule(name="tree, mean of leaves (Tree-GRPO)", expected="biased", tree={"baseline": "group"}),
        Rule(name="tree, mean and std (Tree-GRPO)", expected="biased", tree={"baseline": "group", "std_floor": FLOOR}),
        part(
            name="+ std of the group",
            expected="biased",
            advantages=partial(by_group, baseline="leave_one_out", scale="group"),
        ),
        part(name="+ weight 1 / |y|", expected="biased", weight="trajectory"),
        part(name="+ mean over tokens", expected="biased", weight="token"),
        part(name="+ groups without signal dropped, counted", expected="exact", dropped="counted"),
        part(name="+ groups without signal dropped, not counted", expected="biased", dropped="uncounted"),
        part(name="+ groups without signal drawn again", expected="biased", dropped="redrawn"),
        part(name="+ old policy, ratio of trajectories", expected="exact", ratio="trajectory"),
        part(name="+ old policy, ratio of tokens", expected="biased", ratio="token"),
        part(name="+ old policy, ratio of tokens, clipped", expected="biased", ratio="token", clip=CLIP),
        part(name="+ old policy, no ratio", expected="biased", ratio="one"),
    ]


# enumeration


def trajectories_of(world: World, state: str | None = None) -> list[Trajectory]:
    """Return every path from a state, by default the first, to a stop."""
    here = next(iter(world)) if state is None else state
    found = []
    for action, (reward, following) in enumerate(world[here]):
        rests = [Trajectory((), (), ())] if following is None else trajectories_of(world, following)
        found += [Trajectory((here, *rest.states), (action, *rest.actions), (reward, *rest.rewards)) for rest in rests]
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """Log-probs of every action and their gradients in all logits, of all worlds."""

    logprobs: dict[tuple[str, int], float]
    scores: dict[tuple[str, int], Floats]  # [P]

    @classmethod
    def of(cls, worlds: Sequence[World], logits_P: Floats) -> "Policy":
        logprobs, scores, at = {}, {}, 0
        for state, actions in (item for world in worlds for item in world.items()):
            z = logits_P[at : at + len(actions)]
            log_pi = z - z.max() - np.log(np.exp(z - z.max()).sum())
            for action in range(len(actions)):
                score_P = np.zeros_like(logits_P)
                score_P[at : at + len(actions)] = (np.arange(len(actions)) == action) - np.exp(log_pi)
                logprobs[state, action], scores[state, action] = float(log_pi[action]), score_P
            at += len(actions)
        return cls(logprobs, scores)

    def of_turns(self, one: Trajectory) -> list[float]:
        return [self.logprobs[turn] for turn in zip(one.states, one.actions, strict=True)]


def true_gradient(worlds: Sequence[World], policy: Policy) -> Floats:
    """Return the gradient [P] of the expected return, the mean over prompts: sum_tau P(tau) R(tau) grad log P(tau)."""
    parts = [
        np.exp(sum(policy.of_turns(one))) * sum(one.rewards) * policy.scores[turn]
        for world in worlds
        for one in trajectories_of(world)
        for turn in zip(one.states, one.actions, strict=True)
    ]
    gradient: Floats = np.sum(parts, axis=0) / len(worlds)
    return gradient


class Estimates(NamedTuple):
    """Figures of every batch: its probability, its gradient estimate, and its number of turns."""

    probabilities_B: Floats
    gradients_BP: Floats
    turns_B: Floats


class Figures(NamedTuple):
    """Figures of one rule: see the top of this file."""

    bias: float
    scale: float
    direction: float
    cosine: float
    variance: float
    turns: float


def compare(found: Estimates, truth_P: Floats) -> Figures:
    """Return an estimator's mean and variance compared with the truth."""
    probabilities_B, gradients_BP, turns_B = found
    mean_P = probabilities_B @ gradients_BP
    length, along = float(np.linalg.norm(truth_P)), float(mean_P @ truth_P)
    scale = along / length**2
    spread = float(probabilities_B @ ((gradients_BP - mean_P) ** 2).sum(1))
    return Figures(
        bias=float(np.linalg.norm(mean_P - truth_P)) / length,
        scale=scale,
        direction=float(np.linalg.norm(mean_P - scale * truth_P)) / (abs(scale) * length),
        cosine=along / (length * float(np.linalg.norm(mean_P))),
        variance=spread / (scale * length) ** 2,
        turns=float(probabilities_B @ turns_B),
    )


class Batches:
    """All batches with one group of trajectories per world, and their probabilities under a policy."""

    def __init__(self, worlds: Sequence[World], size: int) -> None:
        self.of_world = [trajectories_of(world) for world in worlds]
        self.all = [one for found in self.of_world for one in found]
        first = np.cumsum([0, *map(len, self.of_world)])
        numbers = [range(first[w], first[w + 1]) for w in range(len(worlds)) for _ in range(size)]
        self.members_BN: Ints = np.array(list(itertools.product(*numbers)))
        self.groups = [w for w in range(len(worlds)) for _ in range(size)]
        self.lengths_T = np.array([len(one.states) for one in self.all])
        self.turns = int(self.lengths_T.max())

    def advantages(self, rule: Advantages) -> Floats:
        """Return the rule's advantages of every batch, [B, N, K]; they do not depend on the policy."""
        result_BNK = np.zeros((*self.members_BN.shape, self.turns))
        for batch, members in enumerate(self.members_BN):
            for n, values in enumerate(rule([self.all[t] for t in members], self.groups)):
                result_BNK[batch, n, : len(values)] = values
        return result_BNK

    def estimates(self, rule: Rule, advantages_BNK: Floats, policy: Policy, old: Policy) -> Estimates:
        """Return the rule's estimates of every batch. old: the policy that sampled, if the rule has a ratio."""
        scores_TKP = np.zeros((len(self.all), self.turns, len(next(iter(policy.scores.values())))))
        new_TK, old_TK = np.zeros((2, len(self.all), self.turns))
        for t, one in enumerate(self.all):
            for k, turn in enumerate(zip(one.states, one.actions, strict=True)):
                scores_TKP[t, k], new_TK[t, k], old_TK[t, k] = (
                    policy.scores[turn],
                    policy.logprobs[turn],
                    old.logprobs[turn],
                )
        coefficients_BNK = advantages_BNK
        if rule.ratio == "trajectory":
            coefficients_BNK = advantages_BNK * np.exp((new_TK - old_TK).sum(1))[self.members_BN][..., None]
        elif rule.ratio == "token":
            coefficients_BNK = clipped(advantages_BNK, new_TK[self.members_BN], old_TK[self.members_BN], rule.clip)
        sampled_TK = new_TK if rule.ratio is None else old_TK
        probabilities_B = np.exp(sampled_TK.sum(1)[self.members_BN].sum(1))
        weights_BN = self.weights(rule, advantages_BNK)
        turns_BN = self.lengths_T[self.members_BN].astype(np.float64)
        if rule.dropped == "redrawn":
            kept_BN = weights_BN > 0
            turns_BN = np.broadcast_to((probabilities_B @ turns_BN) / (probabilities_B @ kept_BN), turns_BN.shape)
            probabilities_B = probabilities_B * kept_BN.all(1)
            probabilities_B = probabilities_B / probabilities_B.sum()
        gradients_BP = np.einsum("bn,bnk,bnkp->bp", weights_BN, coefficients_BNK, scores_TKP[self.members_BN])
        return Estimates(probabilities_B, gradients_BP, turns_BN.sum(1))

    def weights(self, rule: Rule, advantages_BNK: Floats) -> Floats:
        """Return the weight of a trajectory's tokens in each batch, [B, N], as in engine/packing.py."""
        lengths_BN, kept_BN = self.lengths_T[self.members_BN], np.ones(self.members_BN.shape)
        if rule.dropped is not None:
            groups_N = np.array(self.groups)
            for group in set(self.groups):
                signal_B: npt.NDArray[np.bool_] = np.any(advantages_BNK[:, groups_N == group], axis=(1, 2))
                kept_BN[:, groups_N == group] = signal_B[:, None]
        number_B1: Any = len(self.groups)
        if rule.dropped == "uncounted":
            number_B1 = np.maximum(kept_BN.sum(1, keepdims=True), 1.0)
        weights_BN: Floats = kept_BN / number_B1
        if rule.weight == "trajectory":
            weights_BN = weights_BN / lengths_BN
        elif rule.weight == "token":
            weights_BN = kept_BN / lengths_BN.sum(1, keepdims=True)
        return weights_BN


def clipped(advantages_BNK: Floats, new_BNK: Floats, old_BNK: Floats, clip: float | None) -> Floats:
    """Return ratio * A of every token, 0 where the clip removes the gradient, by the product's own objective."""
    advantages_R, new_R, old_R = (torch.from_numpy(x).reshape(-1) for x in (advantages_BNK, new_BNK, old_BNK))
    rows = LossRows(None, torch.zeros(len(new_R), dtype=torch.int64), old_R, advantages_R, torch.ones_like(new_R), None)
    low, high = (1.0, 1e9) if clip is None else (clip, clip)
    ratios_R, _, clipped_R = surrogate_of(new_R, rows, LossSettings(clip_low=low, clip_high=high))
    result_BNK: Floats = (ratios_R * advantages_R).masked_fill(clipped_R, 0.0).reshape(advantages_BNK.shape).numpy()
    return result_BNK


class Tree(NamedTuple):
    """A sampled tree: its turns, their parents (-1: none), and the whole return of each leaf."""

    turns: tuple[tuple[str, int], ...]
    parents: tuple[int, ...]
    rewards: tuple[float | None, ...]


def trees_of(world: World, branches: Sequence[int] = (1, 2, 1)) -> list[Tree]:
    """Return every tree with one first turn, and after each turn `branches` continuations by depth."""

    def below(state: str, depth: int, before: float) -> list[Tree]:
        """Return every outcome of the turns sampled at a state, as a forest."""
        found = []
        for action, (reward, following) in enumerate(world[state]):
            total = before + reward
            if following is None:
                found.append(Tree(((state, action),), (-1,), (total,)))
                continue
            for rest in below(following, depth + 1, total):
                parents = (-1, *(parent + 1 for parent in rest.parents))
                found.append(Tree(((state, action), *rest.turns), parents, (None, *rest.rewards)))
        return [joined(group) for group in itertools.product(found, repeat=branches[depth])]

    return below(next(iter(world)), 0, 0.0)


def joined(trees: Sequence[Tree]) -> Tree:
    """Return one forest of several trees."""
    turns: list[tuple[str, int]] = []
    parents: list[int] = []
    for tree in trees:
        parents += [parent if parent == -1 else parent + len(turns) for parent in tree.parents]
        turns += tree.turns
    return Tree(tuple(turns), tuple(parents), tuple(reward for tree in trees for reward in tree.rewards))


def tree_estimates(rule: Rule, forests_of_world: Sequence[Sequence[Tree]], policy: Policy) -> Estimates:
    """Return the rule's estimates of every batch with one forest per world. Prompts are sampled independently, so a
    batch's probability is a product and its estimate a mean."""
    probabilities_B, gradients_BP, turns_B = np.ones(1), np.zeros((1, 1)), np.zeros(1)
    for forests in forests_of_world:
        own_B = np.array([np.exp(sum(policy.logprobs[turn] for turn in forest.turns)) for forest in forests])
        own_BP = np.array([_of_forest(rule, forest, policy) for forest in forests]) / len(forests_of_world)
        probabilities_B = np.outer(probabilities_B, own_B).reshape(-1)
        gradients_BP = (gradients_BP[:, None] + own_BP).reshape(-1, own_BP.shape[1])
        turns_B = np.add.outer(turns_B, [float(len(forest.turns)) for forest in forests]).reshape(-1)
    return Estimates(probabilities_B, gradients_BP, turns_B)


def _of_forest(rule: Rule, forest: Tree, policy: Policy) -> Floats:
    credit = tree_advantages(forest.parents, forest.rewards, **rule.tree)
    nodes = zip(forest.turns, credit.advantages, credit.weights, strict=True)
    gradient_P: Floats = np.sum([weight * value * policy.scores[turn] for turn, value, weight in nodes], axis=0)
    return gradient_P


def policies(draws: int, seed: int) -> list[tuple[Policy, Policy]]:
    """Return random policies, each with the policy that sampled before an update step."""
    generator = np.random.default_rng(seed)
    logits = sum(len(actions) for world in WORLDS for actions in world.values())
    found = []
    for _ in range(draws):
        new_P = SPREAD * generator.standard_normal(logits)
        old_P = new_P + SHIFT * generator.standard_normal(logits)
        found.append((Policy.of(WORLDS, new_P), Policy.of(WORLDS, old_P)))
    return found


def enumerate_all(draws: int = DRAWS, seed: int = 0) -> list[dict[str, Any]]:
    """Return a row for each rule: its name, the expected result, and per setting its figures over the policies.

    Each figure is {"smallest", "low", "median", "high", "largest"}, low and high being the quartiles. "finding":
    "exact", "scaled" or "biased", over all policies together.
    """
    drawn = policies(draws, seed)
    batches = {name: Batches(WORLDS[:prompts], size) for name, (prompts, size) in BATCHES.items()}
    truths = {n: [true_gradient(WORLDS[:n], new) for new, _ in drawn] for n in (1, 2)}
    forests = [[joined(pair) for pair in itertools.product(trees_of(world), repeat=2)] for world in WORLDS]
    rows = []
    for rule in rules():
        settings: dict[str, Any] = {}
        if rule.advantages is None:
            pairs = zip(drawn, truths[2], strict=True)
            found = [compare(tree_estimates(rule, forests, new), truth_P) for (new, _), truth_P in pairs]
            settings[FORESTS] = _over_policies(found)
        else:
            for name, those in batches.items():
                advantages_BNK = those.advantages(rule.advantages)
                pairs = zip(drawn, truths[BATCHES[name][0]], strict=True)
                found = [compare(those.estimates(rule, advantages_BNK, *both), truth_P) for both, truth_P in pairs]
                settings[name] = _over_policies(found)
        head = {"rule": rule.name, "part": rule.part, "expected": rule.expected}
        rows.append(head | {"finding": next(iter(settings.values()))["finding"], "settings": settings})
    return rows


def _over_policies(found: Sequence[Figures]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name in Figures._fields:
        values = [getattr(one, name) for one in found]
        low, middle, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
        result[name] = {"smallest": min(values), "low": low, "median": middle, "high": high, "largest": max(values)}
    scaled = result["direction"]["largest"] < EXACT and result["scale"]["largest"] - result["scale"]["smallest"] < EXACT
    exact = result["bias"]["largest"] < EXACT
    return result | {"finding": "exact" if exact else "scaled" if scaled else "biased"}


def run_study(out: Path, draws: int = DRAWS, seed: int = 0) -> None:
    """Write the study into the folder `out`, and print its table."""
    from thresher.bench.plots import draw_credit  # importing matplotlib takes a second, after the checks

    check_out(out)
    started = time.perf_counter()
    rows = enumerate_all(draws, seed)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "credit.json", {**facts(), "dtype": "float64", "policies": draws, "seed": seed, "rows": rows})
    draw_credit(rows, out / "credit.png")
    columns = ("rule", "in expectation", "scale", "bias in direction", "middle half", "cosine", "variance", "turns")
    for title, part in (("Rules", False), ("Leave-one-out with one addition", True)):
        chosen = [row for row in rows if row["part"] == part]
        console.table(f"{title}: against the policy gradient, median of {draws} policies", columns, table_of(chosen))
    console.console.print(f"{time.perf_counter() - started:.0f} s in all. Picture and figures are in {out}")


def table_of(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return the rows of the table, each for the first setting that its rule is enumerated in."""
    table: list[tuple[str, ...]] = []
    for row in rows:
        figures = next(iter(row["settings"].values()))
        biased = row["finding"] == "biased"
        low, middle, high = (figures["direction"][part] for part in ("low", "median", "high"))
        table.append(
            (
                row["rule"],
                row["finding"],
                f"{figures['scale']['median']:.3f}",
                f"{middle:.3f}" if biased else "0",
                f"{low:.3f} to {high:.3f}" if biased else "",
                f"{figures['cosine']['median']:.4f}",
                f"{figures['variance']['median']:.2f}",
                f"{figures['turns']['median']:.1f}",
            )
        )
    return table
