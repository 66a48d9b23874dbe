"""Scoring of trajectories, in training and evaluation: reward inputs, then judges, then the reward function.

Judges answer in one call for all inputs, before any reward is computed; the reward itself is a pure function.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from thresher.engine.episode import System
from thresher.engine.protocol.trajectory import Trajectory, check_trajectory
from thresher.engine.scoring.judges import EntailmentJudge
from thresher.policy.tokenizer import Tokenizer
from thresher.retrieval.questions import Question
from thresher.rewards.reward import RewardInput, RewardResult, hash_uniform, reward_all


class VerdictJudge(Protocol):
    """Interface of a judge that says whether a response gives one of the gold answers."""

    @property
    def name(self) -> str: ...

    def rate(self, cases: Sequence[tuple[Sequence[str], str]]) -> list[bool]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Judges:
    """The judges of a run: entailment, an NLI classifier or its stand-in; verdict, a chat model. None: no judge."""

    entailment: EntailmentJudge | None = None
    verdict: VerdictJudge | None = None


@dataclass(frozen=True, slots=True)
class Scored:
    """A trajectory with its question and its reward. rated: whether the reward means something; False if it needs gold
    answers and the question has none."""

    question: Question
    trajectory: Trajectory
    result: RewardResult
    attempt: RewardInput
    rated: bool = True

    def to_dict(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the record from which `thresher score` computes the same reward again, with the exact ids."""
        record = {
            **self.trajectory.to_dict(tokenizer),
            **asked_record(self.question),
            "reward": self.result.reward if self.rated else None,
            "parts": self.result.parts if self.rated else {},
            "answer": self.result.answer,
        }
        if self.result.turns is not None:
            record["turns"] = list(self.result.turns)
        if self.result.tokens is not None:
            record["tokens"] = [list(span) for span in self.result.tokens]
        if self.result.branches is not None:
            record["branch_rewards"] = dict(self.result.branches)
        if self.attempt.entailment is not None:
            record["entailment"] = self.attempt.entailment
        if self.attempt.verdict is not None:
            record["verdict"] = self.attempt.verdict
        return record


def asked_record(question: Question) -> dict[str, Any]:
    """Return the values of a trajectory's question that `thresher score` needs; its id is the trajectory's."""
    record: dict[str, Any] = {"question": question.question, "golden_answers": list(question.golds)}
    if question.passages:
        record["passages"] = [{"title": passage.title, "text": passage.text} for passage in question.passages]
    if question.gold_indices is not None:
        record["gold_indices"] = list(question.gold_indices)
    if question.metadata:
        record["metadata"] = question.metadata
    return record


def score(
    questions: Sequence[Question],
    trajectories: Sequence[Trajectory],
    system: System,
    tokenizer: Tokenizer,
    judges: Judges | None = None,
) -> list[Scored]:
    """Return each trajectory with its reward; trajectories[i] answers questions[i]. Groups must be complete:
    `System.reward_group` gets all trajectories with the same `group`."""
    attempts = [make_reward_input(q, t, tokenizer) for q, t in zip(questions, trajectories, strict=True)]
    attempts = ask_judges(attempts, system, judges or Judges())
    groups = [trajectory.group for trajectory in trajectories]
    results = reward_all(system.reward, system.reward_group, attempts, groups)
    rated = [bool(question.golds) or not system.needs_golds for question in questions]
    return list(map(Scored, questions, trajectories, results, attempts, rated))


def count_tokens(tokenizer: Tokenizer) -> Callable[[str], int]:
    """Return a function that counts the tokens of a text."""
    return lambda text: len(tokenizer.encode(text))


def make_reward_input(question: Question, trajectory: Trajectory, tokenizer: Tokenizer) -> RewardInput:
    """Return the input of the reward for a trajectory; lengths are in tokens."""
    pieces = trajectory.pieces(tokenizer)
    return RewardInput(
        pieces=pieces,
        golds=question.golds,
        question=question.question,
        passages=[(passage.title, passage.text) for passage in question.passages],
        gold_indices=question.gold_indices,
        branches={name: branch.pieces(tokenizer) for name, branch in trajectory.branches.items()},
        length=count_tokens(tokenizer),
        chance=hash_uniform(question.id, pieces),
        metadata=question.metadata,
        scores=trajectory.scores,
    )


def ask_judges(attempts: Sequence[RewardInput], system: System, judges: Judges) -> list[RewardInput]:
    """Return the inputs with the judges' results; each judge is called once for all inputs."""
    if system.claims is not None and judges.entailment is not None:
        claims = [system.claims(attempt) for attempt in attempts]
        found = iter(judges.entailment.probabilities([pair for pairs in claims for pair in pairs]))
        attempts = [
            replace(attempt, entailment=max((next(found) for _ in pairs), default=0.0))
            for attempt, pairs in zip(attempts, claims, strict=True)
        ]
    if system.wants_verdict and judges.verdict is not None:
        answers = [system.answer(attempt) for attempt in attempts]
        asked = [(a.golds, text) for a, text in zip(attempts, answers, strict=True) if text and a.golds]
        verdicts = iter(judges.verdict.rate(asked))
        attempts = [
            replace(attempt, verdict=next(verdicts) if text and attempt.golds else False)
            for attempt, text in zip(attempts, answers, strict=True)
        ]
    return list(attempts)


def check_all(scored: Sequence[Scored], tokenizer: Tokenizer, tags: tuple[str, ...], max_context: int) -> None:
    """Run `check_whole` on all trajectories."""
    for entry in scored:
        check_whole(entry.trajectory, tokenizer, tags, max_context)


def check_whole(trajectory: Trajectory, tokenizer: Tokenizer, tags: tuple[str, ...], max_context: int) -> None:
    """Raise RuntimeError if a trajectory or a branch breaks an invariant, which is a fault of the program."""
    for name, one in (("", trajectory), *trajectory.branches.items()):
        if wrong := check_trajectory(one, tokenizer, tags, max_context):
            what = f"branch {name} of the trajectory" if name else "trajectory"
            raise RuntimeError(f"the {what} of question {trajectory.question_id} is broken: {'; '.join(wrong)}")
