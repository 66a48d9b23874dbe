"""What an update is made of: advantages by group, the weights of each aggregation, schedules, the optimiser's step."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thresher.engine.config.sections import GrpoSection, OptimSection
from thresher.engine.optim.master_weights import MasterWeights, make_optimizer, scheduled_lr, step_optimizer
from thresher.engine.packing import LossNormalizer, build_train_sequences
from thresher.engine.protocol.trajectory import Segment, Trajectory
from thresher.policy.model import Policy
from thresher.rewards.advantages import advantages_by_group, group_advantages
from thresher.rewards.reward import Source

PROMPT, POLICY = Source.PROMPT, Source.POLICY


def bare(rows: int, sample: int = 0) -> Trajectory:
    return Trajectory("q", 0, sample, [Segment(PROMPT, [1, 2]), Segment(POLICY, [3] * rows, [-1.0] * rows)])


CONSTANT = GrpoSection(aggregation="constant", aggregation_constant=50.0)
OF_TEN = LossNormalizer(trajectories=10, tokens=40)  # an optimiser step whose other trajectories are on other ranks


@pytest.mark.parametrize(
    ("grpo", "rows", "totals", "expected"),
    [
        (GrpoSection(), [3, 1, 8], None, [1 / 9, 1 / 3, 1 / 24]),
        (GrpoSection(), [2, 0, 4], None, [1 / 6, 1 / 12]),  # one without a token counts in the mean, and trains nothing
        (GrpoSection(aggregation="token"), [3, 1, 8], None, [1 / 12, 1 / 12, 1 / 12]),
        (CONSTANT, [3, 1, 8], None, [1 / 150, 1 / 150, 1 / 150]),
        (GrpoSection(), [3, 5], OF_TEN, [1 / 30, 1 / 50]),
        (GrpoSection(aggregation="token"), [3, 5], OF_TEN, [1 / 40, 1 / 40]),
        (CONSTANT, [3, 5], OF_TEN, [1 / 500, 1 / 500]),
    ],
)
def test_weights_of_the_aggregations(
    grpo: GrpoSection, rows: list[int], totals: LossNormalizer | None, expected: list[float]
) -> None:
    sequences = build_train_sequences([bare(count) for count in rows], [1.0] * len(rows), grpo, totals)
    assert [one.weight for one in sequences] == pytest.approx(expected)
    assert [len(one.positions) for one in sequences] == [count for count in rows if count]


@given(st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=6), min_size=1, max_size=6))
@settings(max_examples=100, derandomize=True, deadline=None)
def test_what_the_aggregations_average(values: list[list[float]]) -> None:
    trajectories = [bare(len(part)) for part in values]

    def weighted(grpo: GrpoSection) -> float:
        items = build_train_sequences(trajectories, [0.0] * len(values), grpo)
        return sum(item.weight * value for item, part in zip(items, values, strict=True) for value in part)

    flat = [value for part in values for value in part]
    means = [sum(part) / len(part) for part in values]
    assert weighted(GrpoSection()) == pytest.approx(sum(means) / len(means), abs=1e-9)
    assert weighted(GrpoSection(aggregation="token")) == pytest.approx(sum(flat) / len(flat), abs=1e-9)
    constant = GrpoSection(aggregation="constant", aggregation_constant=5.0)
    assert weighted(constant) == pytest.approx(sum(flat) / 5 / len(values), abs=1e-9)


def test_dropping_groups_without_a_signal_leaves_the_weights_of_the_others() -> None:
    trajectories = [bare(2), bare(3), bare(4)]
    kept = build_train_sequences(trajectories, [0.0, 0.5, -0.5], GrpoSection(drop_zero_advantage=True))
    assert kept == build_train_sequences(trajectories, [0.0, 0.5, -0.5], GrpoSection())[1:]
    assert build_train_sequences(trajectories, [0.0] * 3, GrpoSection(drop_zero_advantage=True)) == []


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.1, 0.5, 1.0])), min_size=1, max_size=20))
@settings(max_examples=200, derandomize=True, deadline=None)
def test_advantages_by_group_however_scattered(entries: list[tuple[int, float]]) -> None:
    groups, rewards = [group for group, _ in entries], [reward for _, reward in entries]
    for settings_ in ({}, {"std_floor": 0.3, "sample_std": True, "eps": 0.1}):
        found = advantages_by_group(rewards, groups, **settings_)
        for group in set(groups):
            mine = [reward for number, reward in zip(groups, rewards, strict=True) if number == group]
            expected = group_advantages(mine, **settings_)
            assert [a for number, a in zip(groups, found, strict=True) if number == group] == expected


@pytest.mark.parametrize(
    ("schedule", "warmup_ratio", "expected"),
    [
        ("constant", 0.0, [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("constant", 0.25, [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1, 1, 1]),  # 2.5 steps are three
        ("linear", 0.0, [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
        ("linear", 0.2, [0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
        ("cosine", 0.0, [(1 + math.cos(math.pi * step / 10)) / 2 for step in range(10)]),
        ("cosine", 0.6, [1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1, 1, 0.8535534, 0.5, 0.1464466]),
    ],
)
def test_schedules(schedule: str, warmup_ratio: float, expected: list[float]) -> None:
    found = [scheduled_lr(3e-4, schedule, warmup_ratio, step, 10) for step in range(10)]
    assert found == pytest.approx([3e-4 * share for share in expected])
    beyond = [scheduled_lr(1.0, schedule, warmup_ratio, step, 10) for step in (10, 11, 100)]
    assert beyond == pytest.approx([1.0 if schedule == "constant" else 0.0] * 3)


def test_a_step_clips_by_the_norm_of_all_and_reports_it_unclipped(make_tiny_policy: Callable[..., Policy]) -> None:
    policy = make_tiny_policy().requires_grad_(True)
    weights = MasterWeights(policy)
    parameters = list(policy.parameters())
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = torch.optim.SGD(parameters, lr=99.0)
    count = sum(parameter.numel() for parameter in parameters)
    moved = 0.0
    for largest, lr in ((1.0, 0.5), (math.inf, 0.1)):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 3.0)
        assert weights.clip(largest) == pytest.approx(3 * math.sqrt(count))
        step_optimizer(optimizer, lr)
        moved += lr * 3.0 * min(1.0, largest / (3 * math.sqrt(count)))
        for parameter, start in zip(parameters, before, strict=True):
            torch.testing.assert_close(parameter.data, start - moved)
            assert parameter.grad is None
        assert optimizer.param_groups[0]["lr"] == lr


def test_norms_and_biases_are_not_decayed(make_tiny_policy: Callable[..., Policy]) -> None:
    policy = make_tiny_policy(tie_word_embeddings=False).requires_grad_(True)
    optim = OptimSection(weight_decay=0.1, betas=(0.8, 0.9), eps=1e-5)
    decayed, other = make_optimizer(policy, optim, 0.01).param_groups
    assert (decayed["weight_decay"], other["weight_decay"]) == (0.1, 0.0)
    assert decayed["betas"] == (0.8, 0.9) and decayed["eps"] == 1e-5
    name_of = {id(parameter): name for name, parameter in policy.named_parameters()}
    names = [{name_of[id(parameter)].split(".")[-1] for parameter in group["params"]} for group in (decayed, other)]
    assert names[0] == {
        "embed_VH",
        "untied_head_VH",
        "qkv_weight",
        "o_weight",
        "gate_up_weight",
        "down_weight",
    }
    assert names[1] == {"norm", "input_norm", "post_norm", "qkv_bias"}
    assert len(decayed["params"]) + len(other["params"]) == len(name_of)
