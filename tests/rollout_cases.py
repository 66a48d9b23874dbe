"""What the tests of rollouts share: jobs to run, what to compare two trajectories by, a system of one's own."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch

from thresher.engine.episode import System
from thresher.engine.protocol.trajectory import Trajectory
from thresher.engine.rollout.rollout import Rollout
from thresher.engine.rollout.samples import Job
from thresher.retrieval.questions import Question
from thresher.rewards.result import RewardResult

Make = Callable[..., Rollout]
EOS = "<|endoftext|>"


def make_jobs(questions: Sequence[Question], samples: int = 1) -> list[Job]:
    return [
        Job(question, group, number, 1000 * group + number)
        for group, question in enumerate(questions)
        for number in range(samples)
    ]


def record(trajectory: Trajectory) -> tuple[Any, ...]:
    """Everything about a trajectory but its place in the batch; floats are compared by their bits."""
    segments = [(s.source, s.ids, [x.hex() for x in s.logprobs], s.stop, s.trailing) for s in trajectory.segments]
    return trajectory.question_id, trajectory.reason, trajectory.searches, segments


def assert_logprobs_match(run: Rollout, trajectories: Sequence[Trajectory], temperature: float) -> None:
    """What was recorded at sampling is the log-prob that a fresh forward over the finished ids computes. Both are
    compared with the forward of the same weights in float64: the recorded ones may be off by four times what the fresh
    forward is off by, as root mean squares over all tokens, and over all tokens and columns."""
    vocab, exact = run.tokenizer.vocab_size, deepcopy(run.policy).double()
    recorded, own = [], []
    for trajectory in trajectories:
        ids, rows = torch.tensor(trajectory.ids()), torch.tensor(trajectory.policy_positions(), dtype=torch.int64)
        truth_TV, fresh_TV = (
            torch.log_softmax(policy.logits(ids)[rows - 1, :vocab].to(dtype) / temperature, -1).double()
            for policy, dtype in ((exact, torch.float64), (run.policy, torch.float32))
        )
        recorded.append(torch.tensor(trajectory.policy_logprobs()) - truth_TV.gather(1, ids[rows][:, None])[:, 0])
        own.append((fresh_TV - truth_TV).flatten())
    error, limit = (float(torch.cat(parts).detach().square().mean().sqrt()) for parts in (recorded, own))
    assert error <= 4 * limit


def system_of(episode: Callable[..., Any], tags: tuple[str, ...] = ("<search>", "</search>")) -> System:
    return System("test", tags, episode, lambda attempt: RewardResult(0.0, {}, None), "{question}")
