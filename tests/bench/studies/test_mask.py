"""The study of masking: its treatments hold the rows they claim to, their gradients, and the checks beside them."""

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from exact_norms import exact_norms, off
from torch import Tensor

from thresher.bench.studies import mask
from thresher.bench.studies.mask import (
    PER_ROW,
    TREATMENTS,
    Subject,
    compare,
    compare_parts,
    gradient,
    head_loss,
    poison_changes_nothing,
    removal,
    retrieved_rows,
    run_step,
    stretched,
    treat,
    without_retrieved,
)
from thresher.engine.config.sections import GrpoSection
from thresher.engine.protocol.trajectory import Segment, Trajectory
from thresher.kernels.objective import LossResult
from thresher.policy.model import Policy
from thresher.rewards.transcript import Source

OUTSIDE = 300  # ids from here on occur in retrieved segments, and in them alone
VOCABULARY = 380
ROUNDING = 64 * 2**-24  # relative; the policy computes in float32, as it trains
# nats between log-probs of two forwards in other batches: each rounds logits of up to 10 in 30 sums, 2^-24 10 sqrt(30)
TWO_FORWARDS = 1e-5


def make_trajectories(count: int = 6) -> list[Trajectory]:
    """Prompt, then turns of the policy with passages, or a line of feedback, between them; lengths differ."""
    draw = Random(5)

    def ids(low: int, high: int, most: int) -> list[int]:
        return [draw.randrange(low, high) for _ in range(draw.randrange(1, most))]

    trajectories = []
    for number in range(count):
        segments = [Segment(Source.PROMPT, ids(0, OUTSIDE, 9)), Segment(Source.POLICY, ids(0, OUTSIDE, 9))]
        for _ in range(number % 3):
            segments.append(Segment(Source.RETRIEVED, ids(OUTSIDE, VOCABULARY, 20)))
            segments.append(Segment(Source.POLICY, ids(0, OUTSIDE, 9)))
        if number == 4:
            segments += [Segment(Source.FEEDBACK, ids(0, OUTSIDE, 5)), Segment(Source.POLICY, ids(0, OUTSIDE, 5))]
        trajectories.append(Trajectory(f"q{number}", number // 2, number % 2, segments))
    return trajectories


@pytest.fixture
def subject(make_tiny_policy: Callable[..., Policy]) -> Subject:
    """Six trajectories in batches of a few; one has no advantage, two have nothing that was retrieved."""
    trajectories = make_trajectories()
    made = Subject(
        name="a test",
        policy=make_tiny_policy().requires_grad_(True),
        vocab_size=VOCABULARY,
        trajectories=trajectories,
        advantages=[1.0, -1.0, 0.5, -0.5, 0.7, 0.0],
        grpo=GrpoSection(),
        temperature=0.7,
        micro_batch_tokens=90,
    )
    assert all(made.count(source) > 0 for source in Source)  # else the tests here would say little
    return made


def sources(trajectory: Trajectory) -> list[Source]:
    return [segment.source for segment in trajectory.segments for _ in segment.ids]


def expected_rows(trajectories: list[Trajectory], wanted: set[Source]) -> Counter[tuple[tuple[int, ...], int]]:
    """(all ids before it, id) of every token that is a target, token by token."""
    found: Counter[tuple[tuple[int, ...], int]] = Counter()
    for trajectory in trajectories:
        ids = trajectory.ids()
        for at, source in enumerate(sources(trajectory)):
            if source in wanted:
                found[tuple(ids[:at]), ids[at]] += 1
    return found


# what a treatment holds


@pytest.mark.parametrize("name", TREATMENTS)
def test_a_treatment_has_the_rows_it_should_have(subject: Subject, name: str) -> None:
    trajectories = subject.trajectories
    if name == "removed":
        kept = [[n for n, source in enumerate(sources(t)) if source is not Source.RETRIEVED] for t in trajectories]
        flat = [[t.ids()[n] for n in places] for t, places in zip(trajectories, kept, strict=True)]
        trajectories = [
            replace(t, segments=[Segment(sources(t)[n], [t.ids()[n]]) for n in places])
            for t, places in zip(trajectories, kept, strict=True)
        ]
        assert [t.ids() for t in trajectories] == flat
    outside = {Source.RETRIEVED} if name in ("in_loss", "zeroed") else set()
    treated = treat(name, subject)
    assert len(treated.batches) > 1
    found: Counter[tuple[tuple[int, ...], int]] = Counter()
    for batch, sampled_R in zip(treated.batches, treated.sampled, strict=True):
        starts = [0, *torch.tensor(batch.layout.lengths).cumsum(0).tolist()]
        for row, target, sampled in zip(batch.rows_R.tolist(), batch.targets_R.tolist(), sampled_R, strict=True):
            start = max(s for s in starts if s <= row)
            found[tuple(batch.ids_T[start : row + 1].tolist()), target] += 1
            assert bool(sampled) == (target < OUTSIDE)
    assert found == expected_rows(trajectories, {Source.POLICY} | outside)
    assert treated.rows == sum(found.values())
    assert treated.tokens == sum(len(t) - 1 for t in trajectories)
    if name == "removed":
        assert all(int(batch.ids_T.max()) < OUTSIDE for batch in treated.batches)


def shortened_logprobs(subject: Subject, policy: Policy) -> list[Tensor]:
    """Compute by plain torch the log-probs of the sampled tokens of sequences that never held a passage."""
    found = []
    for trajectory in map(without_retrieved, subject.trajectories):
        ids, rows = trajectory.ids(), trajectory.policy_positions()
        logits_TV = policy.logits(torch.tensor(ids))[:, :VOCABULARY] / subject.temperature
        found.append(logits_TV.log_softmax(-1)[[row - 1 for row in rows], [ids[row] for row in rows]])
    return found


def test_old_logprobs_are_the_policy_s_own(subject: Subject) -> None:
    """Two forwards of one batch may round apart, by four times what plain torch's log-probs are off by, in the mean."""
    with exact_norms(), torch.no_grad():
        reference_R = torch.cat(shortened_logprobs(subject, subject.policy))
        truth_R = torch.cat(shortened_logprobs(subject, deepcopy(subject.policy).double()))
    limit = 4 * (reference_R - truth_R).square().mean().sqrt()
    for name in TREATMENTS:
        ratios_R = torch.cat([result.ratios for result in run_step(subject, treat(name, subject).batches)])
        assert (ratios_R - 1).square().mean().sqrt() <= limit


# gradients


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return compare(one, other)["difference"]


def test_zeroed_does_the_work_of_in_the_loss_and_has_the_gradient_of_masked(subject: Subject) -> None:
    in_loss, zeroed, masked = (treat(name, subject) for name in ("in_loss", "zeroed", "masked"))
    assert zeroed.rows == in_loss.rows > masked.rows
    for batch in zeroed.batches:  # the kernel drops a row of weight 0
        assert bool((batch.weights_R > 0).all())
    assert difference(gradient(subject, zeroed.batches), gradient(subject, masked.batches)) < ROUNDING


def test_in_the_loss_differs_from_masked_by_the_retrieved_rows_gradient(subject: Subject) -> None:
    in_loss, masked = treat("in_loss", subject), treat("masked", subject)
    polluted, clean = gradient(subject, in_loss.batches), gradient(subject, masked.batches)
    alone = gradient(subject, in_loss.weighted(retrieved=1.0, sampled=0.0).batches)
    assert difference(polluted, clean) > 0.01
    assert difference({name: polluted[name] - clean[name] for name in clean}, alone) < ROUNDING


def test_removed_is_the_gradient_of_the_shortened_trajectories(subject: Subject) -> None:
    """By plain torch, sum of w A log p over the sampled tokens: in float64 the truth, in float32 the measure.

    Four times the measure's error are let pass, and 16 roundings.
    """

    def plain(policy: Policy) -> dict[str, Tensor]:
        policy.zero_grad(set_to_none=True)
        pairs = zip(subject.advantages, shortened_logprobs(subject, policy), strict=True)
        torch.stack([-advantage * logprobs.mean() for advantage, logprobs in pairs]).mean().backward()
        return {name: value.grad for name, value in policy.named_parameters() if value.grad is not None}

    with exact_norms():
        truth = plain(deepcopy(subject.policy).double())
    reference = off(plain(subject.policy), truth)
    found = gradient(subject, treat("removed", subject).batches)
    assert off(found, truth) <= 4 * reference + 2**-20
    assert difference(found, gradient(subject, treat("masked", subject).batches)) > 0.01


def test_parts_are_the_whole(subject: Subject) -> None:
    grads = gradient(subject, treat("masked", subject).batches)
    parts = compare_parts(grads, grads)
    assert list(parts) == ["embedding, head", *(f"layer {n} {part}" for n in (0, 1) for part in ("attention", "mlp"))]
    whole = compare(grads, grads)
    assert whole["norm"] ** 2 == pytest.approx(sum(part["norm"] ** 2 for part in parts.values()))
    assert whole["norm"] == pytest.approx(sum(float(g.square().sum()) for g in grads.values()) ** 0.5)
    assert (whole["cosine"], whole["difference"]) == (pytest.approx(1.0), 0.0)


# the checks and figures beside them


def multiplied(subject: Subject, rows_RH: Tensor, batch: Any, chunk_rows: int | None = None) -> LossResult:
    """A loss as it is often masked: every row is computed, and its weight multiplies what came out."""
    head_VH = subject.policy.head_VH
    logits_RV = rows_RH @ head_VH[: subject.vocab_size].detach().T
    targets_R = batch.targets_R.clamp(0)
    logprobs_R = logits_RV.log_softmax(-1).gather(1, targets_R[:, None])[:, 0]
    loss = -(batch.weights_R * (logprobs_R - batch.old_logprobs_R).exp() * batch.advantages_R).sum()
    loss.backward()
    result = head_loss(subject, rows_RH[:0], replace(batch, **{f: getattr(batch, f)[:0] for f in PER_ROW}))
    return replace(result, loss=loss.detach(), hidden_grad_TH=rows_RH.grad)


def test_poisoned_masked_rows_change_nothing(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    treated = treat("in_loss", subject)
    assert poison_changes_nothing(subject, treated)
    monkeypatch.setattr(mask, "head_loss", multiplied)
    assert not poison_changes_nothing(subject, treated)


def test_removal_of_what_nobody_reads_moves_no_logprob(subject: Subject) -> None:
    def figures() -> dict[str, float]:
        return removal(treat("masked", subject), treat("removed", subject), 0.2, 0.2)

    moved = figures()
    assert moved["logprob_gap"] > 0.01
    assert 0 < moved["outside_clip"] < 1  # bound: a share
    passage = Segment(Source.RETRIEVED, [OUTSIDE] * 40)
    for number, trajectory in enumerate(subject.trajectories):
        # Behind the last sampled token, in trajectories of other lengths, and so packed in another order.
        behind = [passage] * (number % 2)
        subject.trajectories[number] = replace(
            without_retrieved(trajectory), segments=without_retrieved(trajectory).segments + behind
        )
    assert figures() == {"logprob_gap": pytest.approx(0.0, abs=TWO_FORWARDS), "outside_clip": 0.0}


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_passages_are_cut_or_repeated_to_a_share(share: float) -> None:
    whole = make_trajectories(9)
    resized = stretched(whole, share)
    retrieved, sampled = (sum(t.count(s) for t in resized) for s in (Source.RETRIEVED, Source.POLICY))
    assert retrieved / (retrieved + sampled) == pytest.approx(share, abs=0.05)
    for before, after in zip(whole, resized, strict=True):
        assert without_retrieved(after) == without_retrieved(before)
        for one, other in zip(before.segments, after.segments, strict=True):
            assert all(token == one.ids[n % len(one.ids)] for n, token in enumerate(other.ids))


def test_retrieved_rows_are_the_retrieved_positions() -> None:
    for trajectory in make_trajectories():
        places = [n for n, source in enumerate(sources(trajectory)) if source is Source.RETRIEVED]
        assert retrieved_rows(trajectory) == places
    assert retrieved_rows(Trajectory("q", 0, 0, [Segment(Source.RETRIEVED, [1, 2])])) == [1]


def test_steps_are_timed_in_all_their_parts(subject: Subject) -> None:
    treated = {name: treat(name, subject) for name in ("masked", "removed")}
    ticks: list[int] = []
    clocks = mask.timed(subject, treated, 2, lambda: ticks.append(1))
    assert len(ticks) == 6
    for clock in clocks.values():
        assert [len(times) for times in (clock.forward, clock.head, clock.backward)] == [2, 2, 2]
        assert clock.step == [sum(parts) for parts in zip(clock.forward, clock.head, clock.backward, strict=True)]
