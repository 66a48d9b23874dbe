"""Shared by the tests of rollouts: jobs, comparable records of trajectories, and a user-defined system."""

from collections.abc import Callable, Sequence
from typing import Any

from logprob_cases import assert_logprobs_are_fresh

from thresher.engine.episode import System
from thresher.engine.protocol.trajectory import Trajectory, trained_contexts
from thresher.engine.rollout.rollout import Job, Rollout
from thresher.retrieval.questions import Question
from thresher.rewards.reward import RewardResult

Make = Callable[..., Rollout]
Written = Callable[..., tuple[Rollout, Trajectory]]
EOS = "<|endoftext|>"


def make_jobs(questions: Sequence[Question], samples: int = 1) -> list[Job]:
    return [
        Job(question, group, number, 1000 * group + number)
        for group, question in enumerate(questions)
        for number in range(samples)
    ]


def record(trajectory: Trajectory) -> tuple[Any, ...]:
    """Return everything about a trajectory except its place in the batch; floats are compared by their bits."""
    segments = [(s.source, s.ids, [x.hex() for x in s.logprobs], s.stop, s.trailing) for s in trajectory.segments]
    return trajectory.question_id, trajectory.reason, trajectory.searches, segments


def assert_logprobs_match(run: Rollout, trajectories: Sequence[Trajectory], temperature: float) -> None:
    """Check that recorded log-probs are those of a fresh forward over the finished ids."""
    trained = [context for one in trajectories for context in trained_contexts(one)]
    written = [(context.ids, context.positions, context.logprobs, temperature) for context in trained]
    assert_logprobs_are_fresh(run.policy, run.tokenizer.vocab_size, written)


def system_of(episode: Callable[..., Any], tags: tuple[str, ...] = ("<search>", "</search>")) -> System:
    return System("test", tags, episode, lambda attempt: RewardResult(0.0, {}, None), "{question}")
