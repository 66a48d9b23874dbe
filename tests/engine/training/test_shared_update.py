"""An update that computes shared prefixes once, against one that computes every item whole: loss and all gradients,
over random tries; and how shared items are cut into micro-batches."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from exact_norms import off
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import make_config

from thresher.engine import packing
from thresher.engine.config.sections import GrpoSection, OptimSection
from thresher.engine.optim.master_weights import MasterWeights
from thresher.engine.packing import TrainSequence, build_train_sequences, pack, pack_shared
from thresher.engine.protocol.trajectory import Segment, Trajectory
from thresher.engine.training.update import Updater, UpdateStats, choose_sharing
from thresher.kernels.attention.backends import parts
from thresher.kernels.attention.parts import cpu_attention
from thresher.kernels.attention.prefix import PrefixForest
from thresher.policy.lora import add_lora
from thresher.policy.model import Policy, init_policy
from thresher.rewards.reward import Source

VOCAB = 29
GRPO = GrpoSection(beta=0.2, entropy_coef=0.01, kl_value="k3")
Gradients = dict[str, torch.Tensor]


@contextmanager
def free_merges() -> Iterator[None]:
    """Share everything that can be shared."""
    with patch.object(packing, "MERGE_COST", 0.0), patch.object(packing, "NODE_COST", 0.0):
        yield


def policies(dtype: torch.dtype, adapters: bool = False) -> tuple[Policy, Policy]:
    """Return a policy and its reference: another model, or, with adapters, the policy itself."""
    policy = init_policy(make_config(), 0)
    if adapters:
        add_lora(policy, rank=4, alpha=8.0)
        noise = torch.Generator().manual_seed(3)
        for name, parameter in policy.named_parameters():
            if parameter.requires_grad and name.endswith("b_OR"):
                parameter.data.normal_(0, 0.2, generator=noise)
        return policy.to(dtype), policy.to(dtype)
    return policy.to(dtype), init_policy(make_config(), 1).to(dtype).requires_grad_(False)


def run(
    items: list[TrainSequence], share: bool, dtype: torch.dtype, adapters: bool = False, **changes: Any
) -> tuple[UpdateStats, Gradients]:
    """Return an update's figures and the gradients that it would have stepped on. changes: of [optim], and `grpo`."""
    policy, reference = policies(dtype, adapters)
    weights = MasterWeights(policy, policies(torch.float32)[0] if dtype == torch.bfloat16 else policy)
    grpo, found = changes.pop("grpo", GRPO), {}
    updater = Updater(weights, reference, OptimSection(share_prefix=share, **changes), grpo, VOCAB, 1)

    def catch(weights: MasterWeights, _: float) -> float:
        found.update({n: p.grad.clone() for n, p in weights.module.named_parameters() if p.grad is not None})
        return 0.0

    with patch.object(MasterWeights, "clip", catch), free_merges():
        return updater.update(items, 0, 0.9), found


def both(*arguments: Any, **changes: Any) -> list[tuple[UpdateStats, Gradients]]:
    """Call `run` with shared prefixes computed once, and with every sequence whole."""
    items, *rest = arguments
    return [run(items, share, *rest, **changes) for share in (True, False)]


def make_item(ids: list[int], places: list[int], old: list[float], advantage: float, weight: float) -> TrainSequence:
    return TrainSequence(ids=ids, positions=places, old_logprobs=old, advantage=advantage, weight=weight)


@st.composite
def tries(draw: st.DrawFn) -> list[TrainSequence]:
    """Draw items that continue a prefix of an earlier one, including equal items and prefixes of others. Random
    positions are trained, so that some prefixes are trained by all their members, others by none."""
    made: list[list[int]] = []
    items = []
    for n in range(draw(st.integers(1, 7))):
        source = draw(st.sampled_from(made)) if made and draw(st.integers(0, 3)) else [7]
        ids = source[: draw(st.integers(1, len(source)))] + draw(st.lists(st.integers(0, VOCAB - 1), max_size=9))
        ids = ids if len(ids) > 1 else [*ids, 5]
        made.append(ids)
        positions = sorted(draw(st.sets(st.integers(1, len(ids) - 1), max_size=len(ids) - 1)))
        old = [-3.0 - (n * 7 + p) % 5 / 4 for p in positions]
        items.append(make_item(ids, positions, old, (n * 5) % 7 / 3 - 1, 0.1))
    return items


def group(prompt: int, completion: int, members: int, seed: int, turn: int = 0) -> list[TrainSequence]:
    """Return samples of one question, of which the first three have the same first turn."""
    noise = torch.Generator().manual_seed(seed)

    def some(count: int) -> list[int]:
        return torch.randint(1, VOCAB, (count,), generator=noise).tolist()

    asked, wrote = some(prompt), some(turn)
    items = []
    for member in range(members):
        ids = [*asked, *(wrote if member < 3 else some(turn)), *some(completion)]
        positions = list(range(prompt, len(ids)))
        items.append(make_item(ids, positions, [-3.4] * len(positions), member % 3 - 0.8, 0.01))
    return items


@pytest.mark.slow
@given(items=tries(), adapters=st.booleans(), budget=st.sampled_from([12, 30, 16384]))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_shared_and_whole_are_one_update(items: list[TrainSequence], adapters: bool, budget: int) -> None:
    (shared, found), (whole, expected) = both(items, torch.float64, adapters, micro_batch_tokens=budget)
    assert (shared.tokens, shared.rows) == (whole.tokens, whole.rows)
    assert shared.computed_tokens <= shared.tokens == whole.computed_tokens
    assert found.keys() == expected.keys()
    if not whole.rows:
        return
    # Ten thousand roundings of float64. Equal rows have equal coefficients, so only sums differ; where these cancel,
    # the scale is one row's weight, .1.
    assert shared.loss == pytest.approx(whole.loss, rel=1e-12, abs=1e-13)
    for name, wanted in expected.items():
        assert (found[name] - wanted).norm() <= 1e-12 * max(float(wanted.norm()), 0.1), name
    for name, value in whole.sums.items():
        assert shared.sums[name] == pytest.approx(value, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("adapters", [False, True])
def test_float32_gradients_of_groups_are_as_near_to_float64s_shared_as_whole(adapters: bool) -> None:
    items = [item for seed in range(3) for item in group(40, 25, 5, seed, turn=8)]
    _, truth = run(items, False, torch.float64, adapters)
    (shared_stats, shared), (whole_stats, whole) = both(items, torch.float32, adapters)
    # For each group the prompt, three first turns and the tokens after them, the last of which is not fed.
    assert shared_stats.computed_tokens <= 3 * (40 + 3 * 8 + 5 * 24) < whole_stats.computed_tokens
    assert shared_stats.loss == pytest.approx(whole_stats.loss, rel=1e-6, abs=1e-6)
    own = off(whole, truth)
    assert own <= 1e-5 and off(shared, whole) > 0  # some hundred roundings of float32; 0 would mean the same code path
    assert off(shared, truth) <= 4 * own + 2**-22  # four roundings
    for name, x in truth.items():
        one = {name: x}
        assert off(shared, one) <= 4 * (off(whole, one) + own)


def test_a_bfloat16_model_is_no_worse_off() -> None:
    """Nothing is clipped, because rounding to bfloat16 moves ratios across a clip's bound in either update."""
    items = [item for seed in range(2) for item in group(40, 25, 4, seed, turn=8)]
    grpo = replace(GRPO, clip_low=0.99, clip_high=50.0)
    _, truth = run(items, False, torch.float64, grpo=grpo)
    (shared_stats, shared), (whole_stats, whole) = both(items, torch.bfloat16, grpo=grpo)
    assert shared_stats.sums["clipped"] == whole_stats.sums["clipped"] == 0
    assert off(shared, truth) <= 4 * off(whole, truth) + 2**-7  # four roundings


@pytest.mark.parametrize("drop", [False, True])
def test_segments_of_all_sources_and_dropped_trajectories(drop: bool) -> None:
    """A search with equal passages: retrieved tokens are shared, and are in no loss."""
    pieces = [(Source.PROMPT, 9), (Source.POLICY, 4), (Source.RETRIEVED, 12), (Source.POLICY, 5)]
    trajectories = []
    for sample in range(4):
        segments = []
        for number, (source, count) in enumerate(pieces):
            ids = [(7 * n + number + (sample if number == 3 else 0)) % VOCAB for n in range(count)]
            segments.append(Segment(source, ids, [-3.0] * count if source is Source.POLICY else []))
        trajectories.append(Trajectory("q", 0, sample, segments, "answered"))
    grpo = replace(GRPO, drop_zero_advantage=drop)
    items = build_train_sequences(trajectories, [1.0, 0.0, -0.5, -0.5], grpo)
    (shared, found), (whole, expected) = both(items, torch.float64, grpo=grpo)
    assert (shared.rows, shared.tokens) == (whole.rows, whole.tokens) == ((27, 87) if drop else (36, 116))
    assert shared.computed_tokens == 25 + 4 * (3 if drop else 4)
    assert off(found, expected) <= 1e-12  # ten thousand roundings of float64


def test_contexts_of_a_group_share_their_beginnings() -> None:
    """Two folded trajectories and a branch of one. The prompt of all contexts is computed once, and so is a state that
    both kept. Shared and whole updates are the same."""
    prompt, state = [n % 11 for n in range(20)], [3, 1, 4, 1, 5, 9, 2, 6]

    def written(first: int, count: int) -> Segment:
        return Segment(Source.POLICY, [(first + 5 * n) % VOCAB for n in range(count)], [-3.0] * count)

    trajectories = []
    for sample in (0, 1):
        own = [Segment(Source.PROMPT, [*prompt]), written(sample, 6), Segment(Source.PROMPT, [*prompt, *state])]
        own += [Segment(Source.RETRIEVED, [7 + sample] * 5), written(2 + sample, 4)]
        trajectories.append(Trajectory("q", 0, sample, own, "answered"))
    branch = [Segment(Source.PROMPT, [*prompt, *state, 27]), written(9, 3)]
    trajectories[1].branches = {"a": Trajectory("q", 0, 1, branch, trained=True)}
    items = build_train_sequences(trajectories, [1.0, [-0.5] * 10 + [0.25] * 3], GRPO)
    (shared, found), (whole, expected) = both(items, torch.float64)
    assert shared.rows == whole.rows == 2 * 10 + 3
    assert whole.computed_tokens == whole.tokens == 2 * (25 + 36) + 31
    # The prompt, the state, and the tokens of each context alone, except its last.
    assert shared.computed_tokens == 20 + 2 * 5 + 8 + 2 * 8 + 3
    assert off(found, expected) <= 1e-12  # ten thousand roundings of float64


def unlike(count: int) -> list[TrainSequence]:
    items = [item for seed in range(count) for item in group(10, 5 + seed, 1, 100 + seed)]
    return [replace(item, ids=[n + 1, *item.ids[1:]]) for n, item in enumerate(items)]


def test_where_nothing_is_shared_the_bits_are_the_same() -> None:
    items = unlike(5)
    for a, b in zip(pack_shared(items, 50), pack(items, 50), strict=True):
        assert a.members == b.members and type(a.layout) is type(b.layout) and not a.rounds
    (shared, found), (whole, expected) = both(items, torch.float32)
    assert shared.loss == whole.loss and shared.sums == whole.sums
    assert found.keys() == expected.keys() and all(torch.equal(found[name], x) for name, x in expected.items())


def test_a_shared_update_is_deterministic() -> None:
    items = [item for seed in range(3) for item in group(30, 9, 4, seed, turn=4)]
    (one, found), (other, again) = (run(items, True, torch.float32) for _ in range(2))
    assert one.sums == other.sums and all(torch.equal(found[name], x) for name, x in again.items())


# --- micro-batches


@given(items=tries(), budget=st.integers(1, 60))
@settings(max_examples=150, derandomize=True, deadline=None)
def test_everything_is_packed_once_within_the_budget(items: list[TrainSequence], budget: int) -> None:
    """The gradients above test the contents of the rows; on CUDA, but not here, also a row twice in a round."""
    with free_merges():
        batches = pack_shared(items, budget)
    members = [n for batch in batches for n in batch.members]
    assert sorted(members) == [n for n, item in enumerate(items) if item.positions]
    for batch in batches:
        assert batch.tokens == sum(len(items[n].ids) - 1 for n in batch.members)
        assert batch.computed_tokens <= (min(budget, batch.tokens) if isinstance(batch.layout, PrefixForest) else 1e9)
        for places in batch.rounds or [torch.arange(len(batch.rows_R))]:
            assert len(set(batch.rows_R[places].tolist())) == len(places)


def test_batches_are_cut_between_groups() -> None:
    """Groups of 60 + 4 x 19 computed tokens, with their items interleaved, and two items that share nothing."""
    groups = [group(60, 20, 4, seed) for seed in range(5)]
    items = [groups[n % 5][n // 5] for n in range(20)] + unlike(2)
    of_item = [n % 5 for n in range(20)] + [5, 6]
    batches = pack_shared(items, 300)
    sets = [{of_item[n] for n in batch.members} for batch in batches]
    assert [len(one) for one in sets] == [2, 2, 1, 2] and sets[3] == {5, 6}
    assert sum(map(len, sets)) == 7 and not isinstance(batches[3].layout, PrefixForest)  # no group is in two batches
    assert [batch.computed_tokens for batch in batches] == [272, 272, 136, 28 + 1]


def test_a_group_that_is_too_large_repeats_its_prefix() -> None:
    items = group(60, 20, 8, 0)  # 60 + 8 x 19 = 212 computed tokens
    batches = pack_shared(items, 160)
    assert sorted(n for batch in batches for n in batch.members) == list(range(8))
    assert [batch.computed_tokens for batch in batches] == [60 + 19 * len(batch.members) for batch in batches]
    assert all(batch.computed_tokens <= 160 and isinstance(batch.layout, PrefixForest) for batch in batches)
    assert len(batches) == 2
    alone = pack_shared(items, 70)  # no two items fit
    assert [batch.members for batch in alone] == [batch.members for batch in pack(items, 70)]


# --- which library computes the parts


def test_the_switch_and_what_a_library_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    policy, _ = policies(torch.float32)
    assert choose_sharing(OptimSection(), policy, "torch") is cpu_attention()
    assert choose_sharing(OptimSection(share_prefix=False), policy, "torch") is None
    assert capsys.readouterr().out == ""
    assert choose_sharing(OptimSection(), policy, "flash3") is None
    said = " ".join(capsys.readouterr().out.split())
    assert said == (
        "optim.share_prefix has no effect: attention is computed by flash3, which gives no log-sum-exp, or has no "
        "backward that takes one"
    )
    assert "flash3" not in parts.LOADERS
