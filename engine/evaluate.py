"""Evaluation: every question once, judged by its system's reward and by measures that no system owns."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from thresher.engine.episode import System
from thresher.engine.rollout import Job, Rollout
from thresher.engine.trajectory import Trajectory, check_trajectory
from thresher.policy.tokenizer import Tokenizer
from thresher.retrieval.questions import Question
from thresher.rewards.result import RewardResult
from thresher.rewards.text import contains_answer
from thresher.rewards.transcript import Source


@dataclass(frozen=True, slots=True)
class Judged:
    """A trajectory with its question and its reward."""

    question: Question
    trajectory: Trajectory
    result: RewardResult

    def to_dict(self, tokenizer: Tokenizer) -> dict[str, Any]:
        return {
            **self.trajectory.to_dict(tokenizer),
            "question": self.question.question,
            "golden_answers": list(self.question.golds),
            "reward": self.result.reward,
            "parts": self.result.parts,
            "answer": self.result.answer,
        }


def judge(
    questions: Sequence[Question], trajectories: Sequence[Trajectory], system: System, tokenizer: Tokenizer
) -> list[Judged]:
    """questions[i] is the one that trajectories[i] answers."""
    return [
        Judged(question, trajectory, system.reward(trajectory.pieces(tokenizer), question.golds))
        for question, trajectory in zip(questions, trajectories, strict=True)
    ]


def check_all(judged: Sequence[Judged], tokenizer: Tokenizer, tags: tuple[str, ...], max_context: int) -> None:
    """Hold every trajectory to its invariants: a violation is a fault of ours, and going on would hide it."""
    for entry in judged:
        if wrong := check_trajectory(entry.trajectory, tokenizer, tags, max_context):
            raise RuntimeError(f"the trajectory of question {entry.question.id} is broken: {'; '.join(wrong)}")


def evaluate(
    rollout: Rollout,
    questions: Sequence[Question],
    temperature: float = 0.0,
    seed: int = 0,
    on_progress: Callable[[int], None] | None = None,
) -> list[Judged]:
    """One trajectory per question. Greedy (temperature 0) is the same for every seed, shuffled passages included."""
    first = seed if temperature else 0
    jobs = [Job(question, number, 0, first + number) for number, question in enumerate(questions)]
    trajectories = rollout.run(jobs, temperature, on_progress)
    return judge(questions, trajectories, rollout.system, rollout.tokenizer)


def summarise(judged: Sequence[Judged]) -> dict[str, Any]:
    """Means over trajectories: reward, em, f1, contains (the answer contains a gold), answered, searches, lengths."""

    def mean(values: Sequence[float]) -> float:
        return sum(values) / max(len(values), 1)

    return {
        "questions": len(judged),
        "reward": mean([entry.result.reward for entry in judged]),
        "em": mean([float(entry.result.parts["em"]) for entry in judged]),
        "f1": mean([float(entry.result.parts["f1"]) for entry in judged]),
        "contains": mean([float(contains_answer(entry.result.answer or "", entry.question.golds)) for entry in judged]),
        "answered": mean([float(entry.result.answer is not None) for entry in judged]),
        "searches": mean([len(entry.trajectory.searches) for entry in judged]),
        "response_tokens": mean([entry.trajectory.count(Source.POLICY) for entry in judged]),
        "tokens": mean([len(entry.trajectory) for entry in judged]),
        "reasons": dict(sorted(Counter(entry.trajectory.reason for entry in judged).items())),
    }
