"""The update against a float64 brute force of the equation at the top of update.py, and the parts it is made of."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from exact_norms import exact_norms
from model_cases import make_config

from thresher.engine.config.sections import GrpoSection, OptimSection
from thresher.engine.optim.master_weights import MasterWeights
from thresher.engine.packing import build_train_sequences
from thresher.engine.protocol.trajectory import Segment, Trajectory
from thresher.engine.store.token_stats import TokenRecorder
from thresher.engine.training import update as grpo_module
from thresher.engine.training.update import Updater, UpdateStats
from thresher.policy.model import Policy, init_policy
from thresher.rewards.reward import Source

VOCAB, COLUMNS = 30, 37  # of the tokenizer, and of the head, which is wider
PROMPT, POLICY, RETRIEVED, FEEDBACK = Source.PROMPT, Source.POLICY, Source.RETRIEVED, Source.FEEDBACK
SHAPES = [
    [(PROMPT, 4), (POLICY, 5), (RETRIEVED, 6), (POLICY, 3)],
    [(PROMPT, 4), (POLICY, 1), (FEEDBACK, 2), (POLICY, 2), (RETRIEVED, 3)],
    [(PROMPT, 7), (POLICY, 9)],
]
ADVANTAGES = [1.3, -0.9, -0.4]


@pytest.fixture(scope="module", autouse=True)
def float64_is_the_truth() -> Iterator[None]:
    with exact_norms():
        yield


def make_policy(seed: int = 0, tied: bool = False) -> Policy:
    """A float64 policy of two layers with random weights."""
    config = make_config(
        vocab_size=COLUMNS, hidden_size=24, intermediate_size=40, tie_word_embeddings=tied, initializer_range=0.3
    )
    return init_policy(config, seed).double().requires_grad_(True)


def spoken(policy: Policy, seed: int, spread: float, temperature: float = 1.0) -> list[Trajectory]:
    """The three shapes with random ids; old log-probs are the policy's own, moved by noise of deviation `spread`."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for sample, shape in enumerate(SHAPES):
        segments = [
            Segment(source, torch.randint(0, VOCAB, (count,), generator=generator).tolist()) for source, count in shape
        ]
        trajectory = Trajectory("q", 0, sample, segments, "answered")
        own = logprobs(policy, trajectory, temperature).detach()
        moved = iter((own + spread * torch.randn(len(own), generator=generator)).float().tolist())
        for segment in segments:
            if segment.source is POLICY:
                segment.logprobs = [next(moved) for _ in segment.ids]
        result.append(trajectory)
    return result


def logits(policy: Policy, trajectory: Trajectory, temperature: float) -> torch.Tensor:
    """At the rows before the policy's tokens, over the tokenizer's columns."""
    rows = torch.tensor(trajectory.policy_positions())
    return policy.logits(torch.tensor(trajectory.ids()))[rows - 1, :VOCAB] / temperature


def logprobs(policy: Policy, trajectory: Trajectory, temperature: float) -> torch.Tensor:
    ids = torch.tensor(trajectory.ids())[torch.tensor(trajectory.policy_positions())]
    return torch.log_softmax(logits(policy, trajectory, temperature), -1).gather(1, ids[:, None])[:, 0]


def rounded(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


def brute_force(
    policy: Policy,
    reference: Policy | None,
    trajectories: list[Trajectory],
    advantage: list[float],
    grpo: GrpoSection,
    temperature: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss, token by token, as it is written at the top of update.py, and autograd's gradient of it; advantages and
    weights are rounded to float32, as a batch has them."""

    def kl(name: str, d: torch.Tensor) -> torch.Tensor:
        return {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) + d - 1}[name]

    total = sum(len(trajectory.policy_positions()) for trajectory in trajectories)
    count = len(trajectories)
    loss = torch.zeros((), dtype=torch.float64)
    for trajectory, a in zip(trajectories, advantage, strict=True):
        a = rounded(a)
        own = logprobs(policy, trajectory, temperature)
        probs = torch.softmax(logits(policy, trajectory, temperature), -1)
        entropy = -(probs * probs.log()).sum(-1)
        ref = None if reference is None else logprobs(reference, trajectory, temperature).detach()
        weight = {
            "trajectory": 1 / (count * len(own)),
            "token": 1 / total,
            "constant": 1 / (count * (grpo.aggregation_constant or 1)),
        }[grpo.aggregation]
        for t, old in enumerate(trajectory.policy_logprobs()):
            ratio = torch.exp(own[t] - old)
            surrogate = torch.minimum(ratio * a, ratio.clamp(1 - grpo.clip_low, 1 + grpo.clip_high) * a)
            if grpo.dual_clip is not None and a < 0:
                surrogate = torch.maximum(surrogate, torch.tensor(grpo.dual_clip * a, dtype=torch.float64))
            term = -surrogate - grpo.entropy_coef * entropy[t]
            if ref is not None and grpo.beta:
                d = own[t] - ref[t]
                slope = kl(grpo.kl_gradient or grpo.kl_value, d)
                term = term + grpo.beta * (kl(grpo.kl_value, d).detach() + slope - slope.detach())
            loss = loss + rounded(weight) * term
    names = [name for name, _ in policy.named_parameters()]
    return loss.detach(), dict(zip(names, torch.autograd.grad(loss, list(policy.parameters())), strict=True))


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Filled by an update with the gradient that it would have stepped on; the weights stay as they are."""
    found: dict[str, torch.Tensor] = {}

    def catch(weights: MasterWeights, _: float) -> float:
        for name, parameter in weights.module.named_parameters():
            assert parameter.grad is not None
            found[name], parameter.grad = parameter.grad, None
        return 0.0

    monkeypatch.setattr(MasterWeights, "clip", catch)
    return found


def update(
    policy: Policy,
    reference: Policy | None,
    trajectories: list[Trajectory],
    advantage: list[float],
    grpo: GrpoSection,
    temperature: float = 1.0,
    **optim: Any,
) -> UpdateStats:
    updater = Updater(MasterWeights(policy), reference, OptimSection(**optim), grpo, VOCAB, 10)
    return updater.update(build_train_sequences(trajectories, advantage, grpo), 0, temperature)


CASES = [
    *[(GrpoSection(kl_value=kl, beta=0.3), 1.0, 0.3, False) for kl in ("k1", "k2", "k3")],
    (GrpoSection(beta=0.0), 1.0, 0.3, False),
    (GrpoSection(kl_value="k3", kl_gradient="k2", beta=0.5), 0.7, 0.3, False),
    (GrpoSection(beta=0.1, clip_low=0.05, clip_high=0.4, entropy_coef=0.02), 1.3, 0.5, False),
    (GrpoSection(beta=0.1, dual_clip=1.5), 1.0, 1.0, False),
    (GrpoSection(beta=0.1, aggregation="token"), 1.0, 0.3, False),
    (GrpoSection(beta=0.1, aggregation="constant", aggregation_constant=64.0), 1.0, 0.3, False),
    (GrpoSection(beta=0.1), 1.0, 0.3, True),
]


@pytest.mark.parametrize(("grpo", "temperature", "spread", "tied"), CASES)
def test_the_gradient_is_that_of_the_equation(
    gradients: dict[str, torch.Tensor],
    grpo: GrpoSection,
    temperature: float,
    spread: float,
    tied: bool,
) -> None:
    policy = make_policy(0, tied)
    reference = make_policy(1, tied).requires_grad_(False) if grpo.beta else None
    trajectories = spoken(policy, 0, spread, temperature)
    arguments = (policy, reference, trajectories, ADVANTAGES, grpo, temperature)
    loss, expected = brute_force(*arguments)
    for budget in (1, 10_000):  # a forward for each trajectory, and one for all
        stats = update(*arguments, micro_batch_tokens=budget)
        # Ten thousand roundings of float64, of some thousand products and sums a row.
        assert stats.loss == pytest.approx(float(loss), rel=1e-12, abs=1e-12)
        for name, gradient in gradients.items():
            assert (gradient - expected[name]).norm() <= 1e-12 * expected[name].norm(), name
        assert stats.rows == 8 + 3 + 9 and stats.tokens == 17 + 11 + 15
        assert stats.sums["clipped"] > 0
    # Columns that the tokenizer does not have are no part of the softmax.
    assert not gradients["embed_VH" if tied else "untied_head_VH"][VOCAB:].any()


def test_the_gradient_in_float32(gradients: dict[str, torch.Tensor]) -> None:
    """Over all weights and six batches no further from float64 than four times what autograd is over the same forward
    in float32."""
    grpo, error, plain_error = GrpoSection(beta=0.2), 0.0, 0.0
    for seed in range(6):
        policy, reference = make_policy(0), make_policy(1).requires_grad_(False)
        trajectories = spoken(policy, 1000 * seed, 0.3)
        _, expected = brute_force(policy, reference, trajectories, ADVANTAGES, grpo, 1.0)
        update(policy.float(), reference.float(), trajectories, ADVANTAGES, grpo)
        _, plain = brute_force(policy, reference, trajectories, ADVANTAGES, grpo, 1.0)
        for name, gradient in gradients.items():
            assert gradient.dtype == torch.float32
            size = expected[name].norm()
            error += float((gradient - expected[name]).norm() / size) ** 2
            plain_error += float((plain[name] - expected[name]).norm() / size) ** 2
    assert error**0.5 <= 4 * plain_error**0.5


def test_on_policy_the_ratio_is_one_and_the_reference_is_at_no_distance() -> None:
    policy, same = make_policy(0), make_policy(0).requires_grad_(False)
    stats = update(policy, same, spoken(policy, 0, 0.0), ADVANTAGES, GrpoSection(beta=0.1))
    rows = stats.rows
    assert stats.largest["logprob_gap_max"] < 1e-6  # old log-probs are float32
    assert stats.sums["ratio"] / rows == pytest.approx(1, abs=1e-6)
    assert stats.sums["logprob_gap"] / rows < 1e-6
    assert stats.sums["clipped"] == stats.sums["kl_k1"] == stats.sums["kl_k2"] == stats.sums["kl_k3"] == 0
    assert stats.capped == 0
    # With every ratio 1 the loss is minus the mean advantage.
    assert stats.loss == pytest.approx(-sum(ADVANTAGES) / 3, abs=1e-6)


def test_statistics_are_sums_and_largest_values_over_the_rows() -> None:
    policy, reference = make_policy(0), make_policy(1).requires_grad_(False)
    trajectories = spoken(policy, 0, 0.3)
    own = torch.cat([logprobs(policy, trajectory, 1.0) for trajectory in trajectories]).detach()
    old = torch.tensor([value for trajectory in trajectories for value in trajectory.policy_logprobs()])
    d = own - torch.cat([logprobs(reference, trajectory, 1.0) for trajectory in trajectories]).detach()
    probs = torch.softmax(torch.cat([logits(policy, trajectory, 1.0) for trajectory in trajectories]), -1).detach()
    ratio, k3 = (own - old).exp(), (-d).exp() + d - 1
    values = {"k1": d, "k2": d * d / 2, "k3": k3, "k3_ratio": ratio * k3}
    sums = {
        "entropy": -(probs * probs.log()).sum(),
        "clipped": torch.zeros(()),  # an advantage of 0 has nothing to clip
        "ratio": ratio.sum(),
        "logprob_gap": (own - old).abs().sum(),
        **{f"kl_{name}": values[name].sum() for name in ("k1", "k2", "k3")},
    }
    coefficients = {"k1": torch.ones(1), "k2": d, "k3": 1 - (-d).exp(), "k3_ratio": ratio * d, "none": torch.zeros(1)}
    for value, gradient in (*((name, None) for name in values), ("k3", "k2"), ("none", "k3"), ("k2", "none")):
        same = make_policy(0)  # an update moves the policy
        grpo = GrpoSection(beta=0.1, kl_value=value, kl_gradient=gradient)
        # Of all micro-batches, here one for each trajectory.
        stats = update(same, reference, trajectories, [0.0] * 3, grpo, micro_batch_tokens=20)
        assert stats.sums == {name: pytest.approx(float(number), rel=1e-6) for name, number in sums.items()}
        expected = {"kl_coefficient_largest": coefficients[gradient or value], "logprob_gap_max": ratio.log()}
        expected |= {} if value == "none" else {"kl_largest": values[value]}
        assert stats.largest == {
            name: pytest.approx(float(numbers.abs().max()), rel=1e-6) for name, numbers in expected.items()
        }
    without = update(make_policy(0), None, trajectories, [1.0, 0.0, 0.0], GrpoSection(beta=0.0))
    assert without.largest.keys() == {"logprob_gap_max"}


def test_the_losss_workspace_is_the_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, reference = make_policy(0), make_policy(1).requires_grad_(False)
    seen: list[int | None] = []
    for name in ("grpo_loss", "token_logprobs"):
        real = getattr(grpo_module, name)

        def spy(*arguments: Any, real: Any = real, **options: Any) -> Any:
            seen.append(options["workspace_bytes"])
            return real(*arguments, **options)

        monkeypatch.setattr(grpo_module, name, spy)
    for size in (None, 10**6):
        update(policy, reference, spoken(policy, 0, 0.3), ADVANTAGES, GrpoSection(beta=0.1), loss_workspace_bytes=size)
    assert seen == [None, None, 10**6, 10**6]


def test_gradient_enters_only_where_the_policy_spoke_next(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy(0)
    trajectories = spoken(policy, 0, 0.1)
    seen: list[torch.Tensor] = []
    forward = policy.hidden

    def watched(*arguments: Any) -> torch.Tensor:
        seen.append(forward(*arguments))
        seen[-1].retain_grad()
        return seen[-1]

    monkeypatch.setattr(policy, "hidden", watched)
    update(policy, None, trajectories, ADVANTAGES, GrpoSection(beta=0, clip_low=0.9, clip_high=9))
    grad_TH = seen[0].grad
    assert grad_TH is not None
    start = 0
    for trajectory in sorted(trajectories, key=len, reverse=True):
        touched = {start + row - 1 for row in trajectory.policy_positions()}
        for row in range(start, start + len(trajectory) - 1):
            assert bool(grad_TH[row].any()) == (row in touched), row
        start += len(trajectory) - 1
    assert start == len(grad_TH)


def test_what_follows_the_last_policy_token_changes_no_bit(gradients: dict[str, torch.Tensor]) -> None:
    policy = make_policy(0)
    trajectories = spoken(policy, 0, 0.3)
    update(policy, None, trajectories, ADVANTAGES, GrpoSection(beta=0))
    first = dict(gradients)
    last = trajectories[1].segments[-1]
    assert last.source is RETRIEVED
    last.ids = [(token + 7) % VOCAB for token in last.ids]
    update(policy, None, trajectories, ADVANTAGES, GrpoSection(beta=0))
    assert all(torch.equal(gradients[name], first[name]) for name in first)
    # The same ids said by the policy would be trained.
    last.source, last.logprobs = POLICY, [-3.0] * len(last.ids)
    update(policy, None, trajectories, ADVANTAGES, GrpoSection(beta=0))
    assert not torch.equal(gradients["norm"], first["norm"])


def test_dropping_changes_no_gradient_where_there_is_no_kl(gradients: dict[str, torch.Tensor]) -> None:
    policy = make_policy(0)
    trajectories = spoken(policy, 0, 0.2)
    all_of_them = update(policy, None, trajectories, [0.7, 0.0, -0.7], GrpoSection(beta=0))
    first = dict(gradients)
    fewer = update(policy, None, trajectories, [0.7, 0.0, -0.7], GrpoSection(beta=0, drop_zero_advantage=True))
    assert (all_of_them.rows, fewer.rows) == (20, 17) and fewer.tokens < all_of_them.tokens
    for name in first:
        torch.testing.assert_close(gradients[name], first[name], rtol=1e-10, atol=1e-12)


def test_an_old_log_prob_that_is_no_number_is_refused() -> None:
    policy = make_policy(0)
    trajectories = spoken(policy, 0, 0.1)
    trajectories[2].segments[1].logprobs[4] = math.nan
    with pytest.raises(ValueError, match=r"old_logprobs_T\[4\] is nan, not a finite number"):
        update(policy, None, trajectories, ADVANTAGES, GrpoSection(beta=0), micro_batch_tokens=1)


def test_an_update_moves_the_policy_towards_what_was_rewarded() -> None:
    policy = make_policy(0).float()
    trajectories = spoken(policy, 0, 0.0)
    before = [float(logprobs(policy, trajectory, 1.0).detach().sum()) for trajectory in trajectories]
    grpo = GrpoSection(beta=0)
    updater = Updater(MasterWeights(policy), None, OptimSection(lr=1e-3, warmup_ratio=0.5), grpo, VOCAB, 10)
    stats = updater.update(build_train_sequences(trajectories, [1.0, -1.0, 0.0], grpo), 1, 1.0)
    assert stats.lr == pytest.approx(1e-3 * 2 / 5) and stats.grad_norm > 0 and stats.seconds > 0
    after = [float(logprobs(policy, trajectory, 1.0).detach().sum()) for trajectory in trajectories]
    assert after[0] > before[0] and after[1] < before[1]


def test_the_optimiser_steps_on_the_gradient_clipped_to_the_recipes_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW's first step is nearly the same for a gradient of any size, so the weights alone would not tell."""
    policy, grpo = make_policy(0), GrpoSection(beta=0)
    items = build_train_sequences(spoken(policy, 0, 0.2), ADVANTAGES, grpo)
    found: list[torch.Tensor] = []

    def catch(optimizer: torch.optim.Optimizer, _: float) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        found.append(torch.cat([parameter.grad.flatten() for parameter in parameters]))
        optimizer.zero_grad()

    monkeypatch.setattr(grpo_module, "step_optimizer", catch)
    norms = []
    for largest in (math.inf, 0.01):
        updater = Updater(MasterWeights(policy), None, OptimSection(max_grad_norm=largest), grpo, VOCAB, 10)
        norms.append(updater.update(items, 0, 1.0).grad_norm)
    whole, clipped = found
    assert norms == pytest.approx([float(whole.norm())] * 2) and norms[0] > 0.1
    torch.testing.assert_close(clipped, whole * (0.01 / norms[0]), rtol=1e-4, atol=0)


def test_bfloat16_is_a_copy_of_float32_weights_that_are_trained() -> None:
    master = make_policy(0).float()
    policy = make_policy(0).bfloat16()
    trajectories = spoken(policy, 0, 0.0)
    before = {name: value.clone() for name, value in master.state_dict().items()}
    grpo = GrpoSection(beta=0)
    # A step of 1e-6 is lost on a bfloat16 weight of .3 and must not be lost on the float32 one.
    updater = Updater(MasterWeights(policy, master), None, OptimSection(lr=1e-6), grpo, VOCAB, 10)
    updater.update(build_train_sequences(trajectories, ADVANTAGES, grpo), 0, 1.0)
    for (name, trained), used in zip(master.named_parameters(), policy.parameters(), strict=True):
        assert trained.dtype == torch.float32 and used.dtype == torch.bfloat16
        assert torch.equal(used.data, trained.data.bfloat16())
        assert used.grad is None and trained.grad is None
        moved = (trained.data - before[name]).abs()
        assert 0 < float(moved.max()) < 2e-6, name


def test_recording_changes_no_bit_and_finds_what_the_loss_found(gradients: dict[str, torch.Tensor]) -> None:
    policy, reference = make_policy(0), make_policy(1)
    trajectories = spoken(policy, 3, 0.0, 0.7)
    for trajectory in trajectories:
        for segment in trajectory.segments:
            # Ratios of about .67 and 1.49 in turn, so that in every trajectory some are clipped and some are not.
            segment.logprobs = [value + (0.4, -0.4)[n % 2] for n, value in enumerate(segment.logprobs)]
    grpo = GrpoSection(beta=0.1, tis_level="token", old_logprobs="recomputed", drop_zero_advantage=True)
    items = build_train_sequences(trajectories, [1.3, 0.0, -0.4], grpo)
    items[1] = replace(items[1], importance=[0.5] * 9)
    found = []
    for recorder in (None, TokenRecorder()):
        # One item a micro-batch, and these longest first: the second trajectory's place is not its item's.
        optim = OptimSection(micro_batch_tokens=1)
        Updater(MasterWeights(policy), reference, optim, grpo, VOCAB, 10).update(items, 0, 0.7, recorder)
        found.append({name: value.clone() for name, value in gradients.items()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert recorder is not None
    values = recorder.found()
    assert set(values) == {(0, 0), (0, 2)}
    for sample in (0, 2):
        trajectory, recorded = trajectories[sample], values[0, sample]
        own = logprobs(policy, trajectory, 0.7).detach()
        probs = torch.softmax(logits(policy, trajectory, 0.7), -1)
        ratio = torch.exp(own - torch.tensor(trajectory.policy_logprobs(), dtype=torch.float64))
        clipped = ratio > 1.2 if sample == 0 else ratio < 0.8
        reference_own = logprobs(reference, trajectory, 0.7).detach()
        entropy = -(probs * probs.log()).sum(-1).detach()
        assert recorded["recomputed"] == pytest.approx(own.numpy(), rel=2**-24)  # bound: rounded to float32
        assert recorded["reference"] == pytest.approx(reference_own.numpy(), rel=2**-24)  # bound: rounded to float32
        assert recorded["entropy"] == pytest.approx(entropy.numpy(), rel=2**-11)  # bound: rounded to float16
        assert recorded["clipped"].tolist() == clipped.tolist() and 0 < clipped.sum() < len(clipped)
        assert recorded["advantage"] == pytest.approx([1.3] * 8 if sample == 0 else [-0.2] * 9)
