"""What the tests of rollouts share: jobs to run, what to compare two trajectories by, a system of one's own."""

from collections.abc import Callable, Sequence
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


def assert_logprobs_match(run: Rollout, trajectories: Sequence[Trajectory], temperature: float, limit: float) -> None:
    """What was recorded at sampling equals a fresh forward over the finished ids."""
    vocab = run.tokenizer.vocab_size
    for trajectory in trajectories:
        ids, rows = torch.tensor(trajectory.ids()), torch.tensor(trajectory.policy_positions())
        if len(rows):
            logits_TV = run.policy.logits(ids)[:, :vocab].float() / temperature
            fresh = torch.log_softmax(logits_TV, -1)[rows - 1, ids[rows]]
            recorded = torch.tensor(trajectory.policy_logprobs())
            torch.testing.assert_close(recorded, fresh, rtol=0, atol=limit)


def system_of(episode: Callable[..., Any], tags: tuple[str, ...] = ("<search>", "</search>")) -> System:
    return System("test", tags, episode, lambda attempt: RewardResult(0.0, {}, None), "{question}")
