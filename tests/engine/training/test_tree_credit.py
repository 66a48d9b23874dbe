"""Advantages of a tree's nodes: from trajectories with inherited turns to the tokens and weights of an update."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from model_cases import make_config
from update_cases import VOCAB, make_updater

from thresher.common.errors import UserError
from thresher.engine import packing
from thresher.engine.config.recipe import Recipe
from thresher.engine.config.sections import GrpoSection
from thresher.engine.config.tables import from_dict
from thresher.engine.packing import build_train_sequences
from thresher.engine.protocol.trajectory import Segment, Trajectory
from thresher.engine.scoring.score import Scored
from thresher.engine.training.credit import token_advantages
from thresher.policy.model import init_policy
from thresher.policy.tokenizer import Tokenizer
from thresher.retrieval.questions import Question
from thresher.rewards.advantages import advantages_by_group
from thresher.rewards.credit import tree_advantages
from thresher.rewards.reward import RewardInput, RewardResult, Source

RULES: list[dict[str, Any]] = [
    {"baseline": "leave_one_out", "scale": "none"},
    {"baseline": "leave_one_out", "scale": "none", "across": 0.5},
    {"baseline": "group", "scale": "none"},
    {"baseline": "group", "scale": "group", "std_floor": 0.1, "sample_std": True, "std_eps": 1e-3},
]


@dataclass
class Forest:
    """A question's trees: the parent of each node, the return of each leaf, and the nodes of each sample. Node n's turn
    has n % 3 + 1 tokens, all equal to n; the node of a tree's prompt has none."""

    parents: list[int] = field(default_factory=list)
    returns: list[float | None] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)
    forked: list[tuple[int, int] | None] = field(default_factory=list)

    def add(self, parent: int) -> int:
        self.parents.append(parent)
        self.returns.append(None)
        return len(self.parents) - 1

    def grow(self, rng: Random, after: tuple[int, int] | None = None) -> None:
        """Add a sample of one to three turns of its own, which begins a tree or continues after (sample, turns)."""
        path = [self.add(-1)] if after is None else self.paths[after[0]][: after[1] + 1]
        for _ in range(rng.randint(1, 3)):
            path = [*path, self.add(path[-1])]
        self.returns[path[-1]] = rng.random()
        self.paths.append(path)
        self.forked.append(after)

    def scored(self) -> list[Scored]:
        question, found = Question("q", "Who?", ("x",)), []
        for sample, (path, forked) in enumerate(zip(self.paths, self.forked, strict=True)):
            segments = [Segment(Source.PROMPT, [0, 0])]
            for node in path[1:]:
                ids = [node] * (node % 3 + 1)
                segments += [Segment(Source.POLICY, ids, [-1.0] * len(ids)), Segment(Source.RETRIEVED, [1])]
            total = self.returns[path[-1]]
            assert total is not None
            trajectory = Trajectory("q", 4, sample, segments, forked=forked)
            found.append(Scored(question, trajectory, RewardResult(total), RewardInput(pieces=[], golds=("x",))))
        return found


@contextmanager
def free_merges() -> Iterator[None]:
    """Share everything that can be shared."""
    with patch.object(packing, "MERGE_COST", 0.0), patch.object(packing, "NODE_COST", 0.0):
        yield


def forest(seed: int, trees: int = 2, forks: int = 5) -> Forest:
    rng, made = Random(seed), Forest()
    for _ in range(trees):
        made.grow(rng)
    for _ in range(forks):
        sample = rng.randrange(len(made.paths))
        inherited = (made.forked[sample] or (0, 0))[1]
        first = inherited + 1 if inherited else 0
        nodes = range(first, len(made.paths[sample]) - 1)
        if nodes:
            made.grow(rng, (sample, rng.choice(nodes)))
    return made


def credited(scored: Sequence[Scored], grpo: GrpoSection, tokenizer: Tokenizer) -> list[list[float]]:
    rewards = [entry.result.reward for entry in scored]
    return token_advantages(scored, rewards, [7.0] * len(scored), [{}] * len(scored), grpo, tokenizer, 0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(6))
def test_each_token_is_trained_once_by_its_node(rule: dict[str, Any], seed: int, tiny_tokenizer: Tokenizer) -> None:
    """Weight times advantage of every token is the rule's value for its node, divided by the whole path's length."""
    made = forest(seed)
    scored = made.scored()
    own = {"std_floor": rule["std_floor"], "sample_std": True, "eps": rule["std_eps"]} if "std_floor" in rule else {}
    credit = tree_advantages(
        made.parents, made.returns, across=rule.get("across", 1.0), baseline=rule["baseline"], **own
    )
    trajectories = [entry.trajectory for entry in scored]
    for keys in ({"aggregation": "constant", "aggregation_constant": 1.0}, {"aggregation": "trajectory"}):
        grpo = GrpoSection(advantage="tree", **rule, **keys)
        sequences = build_train_sequences(trajectories, credited(scored, grpo, tiny_tokenizer), grpo)
        trained = []
        for one in sequences:
            assert isinstance(one.advantage, list) and one.ids == trajectories[one.key[1]].ids()
            length = len(trajectories[one.key[1]].policy_positions()) if keys["aggregation"] == "trajectory" else 1
            for at, value in zip(one.positions, one.advantage, strict=True):
                node = one.ids[at]
                trained.append(node)
                expected = credit.weights[node] * credit.advantages[node] / length
                assert one.weight * value == pytest.approx(expected, rel=1e-12, abs=1e-15)
        nodes = [n for n, parent in enumerate(made.parents) if parent != -1]
        assert sorted(trained) == sorted(n for n in nodes for _ in range(n % 3 + 1))


def test_a_mean_over_tokens_counts_each_leafs_path(tiny_tokenizer: Tokenizer) -> None:
    """The tokens' weights w_n G times 1 / sum |y_i| add up to 1 if a node has the weight of its leaves."""
    made = forest(1)
    grpo = GrpoSection(advantage="tree", baseline="group", scale="none", aggregation="token")
    scored = made.scored()
    credit = tree_advantages(made.parents, made.returns, baseline="group")
    sequences = build_train_sequences(
        [entry.trajectory for entry in scored], credited(scored, grpo, tiny_tokenizer), grpo
    )
    total = math.fsum(
        one.weight * len(scored) * credit.weights[one.ids[at]] for one in sequences for at in one.positions
    )
    assert total == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("across", [0.0, 1.0, 2.0])
def test_without_forks_it_is_the_trajectory_rule(across: float, tiny_tokenizer: Tokenizer) -> None:
    scored = forest(3, trees=5, forks=0).scored()
    rewards = [entry.result.reward for entry in scored]
    for baseline, factor in (("leave_one_out", 1 + across), ("group", across)):
        grpo = GrpoSection(advantage="tree", baseline=baseline, scale="none", across=across)  # type: ignore[arg-type]
        plain = advantages_by_group(rewards, [0] * 5, baseline=baseline, scale="none")  # type: ignore[arg-type]
        for values, one, entry in zip(credited(scored, grpo, tiny_tokenizer), plain, scored, strict=True):
            count = len(entry.trajectory.policy_positions())
            assert values == pytest.approx([factor * one] * count, rel=1e-12, abs=1e-15)


def test_a_trajectory_without_a_turn_takes_no_part(tiny_tokenizer: Tokenizer) -> None:
    made = forest(2, trees=3, forks=0)
    scored = made.scored()
    scored[1].trajectory.segments = scored[1].trajectory.segments[:1]
    grpo = GrpoSection(advantage="tree", baseline="leave_one_out", scale="none", across=0.0)
    first, none, last = credited(scored, grpo, tiny_tokenizer)
    difference = scored[0].result.reward - scored[2].result.reward
    assert none == []
    assert first == pytest.approx([difference] * len(first)) and last == pytest.approx([-difference] * len(last))


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("rule", [RULES[0], RULES[3]])
def test_the_gradient_is_the_sum_over_nodes(
    rule: dict[str, Any], share: bool, tiny_tokenizer: Tokenizer, gradients: dict[str, torch.Tensor]
) -> None:
    """The reference is the sum over nodes of w_n A_n grad log pi(node | its path), in float64. Each term comes from a
    separate forward. Sharing computes each token of the forest once."""
    policy = init_policy(make_config(vocab_size=VOCAB + 2), 0).double().requires_grad_(True)
    names, parameters = zip(*policy.named_parameters(), strict=True)
    made = forest(5)
    assert len(made.parents) < VOCAB
    scored, old = made.scored(), dict[int, list[float]]()
    grpo = GrpoSection(advantage="tree", beta=0.0, aggregation="constant", aggregation_constant=1.0, **rule)
    own = {"std_floor": rule["std_floor"], "sample_std": True, "eps": rule["std_eps"]} if "std_floor" in rule else {}
    credit = tree_advantages(made.parents, made.returns, baseline=rule["baseline"], **own)
    expected, sizes = [torch.zeros_like(one) for one in parameters], 0.0
    for entry in scored:
        at, ids = 0, torch.tensor(entry.trajectory.ids())
        logprobs = torch.log_softmax(policy.logits(ids)[:, :VOCAB], -1)
        for segment in entry.trajectory.segments:
            if segment.source is Source.POLICY:
                node, rows = segment.ids[0], torch.arange(at, at + len(segment.ids))
                written = logprobs[rows - 1, node]
                segment.logprobs = written.tolist()
                if node not in old:
                    old[node] = segment.logprobs
                    factor = -credit.weights[node] * credit.advantages[node]
                    found = torch.autograd.grad(written.sum(), parameters, retain_graph=True)
                    expected = [one + factor * grad for one, grad in zip(expected, found, strict=True)]
                    sizes += abs(factor) * math.sqrt(sum(grad.square().sum().item() for grad in found))
            at += len(segment.ids)
    trajectories = [entry.trajectory for entry in scored]
    sequences = build_train_sequences(trajectories, credited(scored, grpo, tiny_tokenizer), grpo)
    with free_merges():
        stats = make_updater(policy, None, grpo, share_prefix=share).update(sequences, 0, 1.0)
    assert stats is not None and stats.rows == sum(len(values) for values in old.values())
    fed = [one.ids[:-1] for one in sequences]
    beginnings = {tuple(ids[:end]) for ids in fed for end in range(1, len(ids) + 1)}
    assert stats.computed_tokens == (len(beginnings) if share else sum(map(len, fed)))
    gap = math.sqrt(sum((gradients[n] - e).square().sum().item() for n, e in zip(names, expected, strict=True)))
    # A micro-batch holds weight, advantage and old log-prob in float32: 2^-24 of each, the log-prob's times itself.
    largest = max(abs(value) for values in old.values() for value in values)
    assert gap <= (2 + largest) * 2**-24 * sizes + 1e-12 < 1e-3 * sizes


def recipe(**sections: Any) -> Recipe:
    return from_dict(Recipe, {"model": {"path": "m"}, **sections}, "here")


def test_keys_that_do_not_fit_are_refused() -> None:
    tree = {"advantage": "tree"}
    for size, near in ((8, "6 or 10"), (2, "6"), (5, "6"), (9, "6 or 10")):
        with pytest.raises(UserError, match=rf"group_size: expected trees x .*, such as {near} with .* got {size}"):
            recipe(rollout={"trees": 2, "tree_nodes": 2, "group_size": size}, grpo=tree)
    forest = {"trees": 2, "group_size": 6}
    assert recipe(rollout=forest | {"group_size": 10}, grpo=tree | {"refill": True}).rollout.trees == 2
    for rollout, grpo, why in (
        (forest, {}, r'advantage: expected "tree" with rollout.trees > 0, got "trajectory"'),
        ({}, tree, r'advantage: expected another value with rollout.trees = 0, got "tree"'),
        (forest, tree | {"baseline": "batch"}, "baseline: expected group or leave_one_out"),
        (forest, tree | {"baseline": "leave_one_out"}, "scale: expected none with .*leave_one_out"),
    ):
        with pytest.raises(UserError, match=why):
            recipe(rollout=rollout, grpo=grpo)
