"""Trajectories of random ids, and the loss of an update over them, token by token in float64."""

from collections.abc import Sequence
from typing import Any

import torch

from thresher.engine.config.sections import GrpoSection, OptimSection
from thresher.engine.optim.master_weights import MasterWeights
from thresher.engine.packing import build_train_sequences
from thresher.engine.protocol.trajectory import Segment, Trajectory
from thresher.engine.training.update import Updater, UpdateStats
from thresher.policy.model import Policy
from thresher.rewards.reward import Source

VOCAB = 30  # of the tokenizer; heads are wider
PROMPT, POLICY, RETRIEVED, FEEDBACK = Source.PROMPT, Source.POLICY, Source.RETRIEVED, Source.FEEDBACK
Shape = Sequence[tuple[Source, int]]
SHAPES: list[Shape] = [
    [(PROMPT, 4), (POLICY, 5), (RETRIEVED, 6), (POLICY, 3)],
    [(PROMPT, 4), (POLICY, 1), (FEEDBACK, 2), (POLICY, 2), (RETRIEVED, 3)],
    [(PROMPT, 7), (POLICY, 9)],
]
ADVANTAGES = [1.3, -0.9, -0.4]


def spoken(
    policy: Policy, seed: int, spread: float, temperature: float = 1.0, shapes: Sequence[Shape] = SHAPES
) -> list[Trajectory]:
    """Return the three shapes with random ids; old log-probs are the policy's, moved by noise of deviation `spread`."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for sample, shape in enumerate(shapes):
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


FOLDED = [(PROMPT, 4), (POLICY, 3), (RETRIEVED, 4), (PROMPT, 6), (POLICY, 2), (FEEDBACK, 3), (POLICY, 4), (PROMPT, 3)]
BRANCH = [(PROMPT, 5), (POLICY, 2)]


def logits(policy: Policy, trajectory: Trajectory, temperature: float = 1.0) -> torch.Tensor:
    """Return the logits at the rows before the policy's tokens, over the tokenizer's columns."""
    rows = torch.tensor(trajectory.policy_positions(), dtype=torch.int64)
    return policy.logits(torch.tensor(trajectory.ids()))[rows - 1, :VOCAB] / temperature


def logprobs(policy: Policy, trajectory: Trajectory, temperature: float = 1.0) -> torch.Tensor:
    ids = torch.tensor(trajectory.ids())[torch.tensor(trajectory.policy_positions(), dtype=torch.int64)]
    return torch.log_softmax(logits(policy, trajectory, temperature), -1).gather(1, ids[:, None])[:, 0]


def entropies(policy: Policy, trajectory: Trajectory, temperature: float = 1.0) -> torch.Tensor:
    probs = torch.softmax(logits(policy, trajectory, temperature), -1)
    return -(probs * probs.log()).sum(-1)


def rounded(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


def brute_force(
    policy: Policy,
    reference: Policy | None,
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float],
    grpo: GrpoSection,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss, token by token, as defined at the top of update.py, and autograd's gradient of it; advantages
    and weights are rounded to float32, as in a micro-batch."""

    def kl(name: str, d: torch.Tensor) -> torch.Tensor:
        return {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) + d - 1}[name]

    total = sum(len(trajectory.policy_positions()) for trajectory in trajectories)
    count = len(trajectories)
    loss = torch.zeros((), dtype=torch.float64)
    for trajectory, a in zip(trajectories, map(rounded, advantages), strict=True):
        own, entropy = logprobs(policy, trajectory, temperature), entropies(policy, trajectory, temperature)
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


def make_updater(
    policy: Policy, reference: Policy | None, grpo: GrpoSection, *, master: Policy | None = None, **optim: Any
) -> Updater:
    return Updater(MasterWeights(policy, master), reference, OptimSection(**optim), grpo, VOCAB, 10)


def update(
    policy: Policy,
    reference: Policy | None,
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float],
    grpo: GrpoSection,
    temperature: float = 1.0,
    **optim: Any,
) -> UpdateStats:
    sequences = build_train_sequences(trajectories, advantages, grpo)
    stats = make_updater(policy, reference, grpo, **optim).update(sequences, 0, temperature)
    assert stats is not None
    return stats
