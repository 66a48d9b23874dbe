"""One GRPO step, top to bottom: draw questions, roll out, score, advantage, update.

What each line of `GrpoStep.__call__` does is in one file:

    rollout.run(..)     engine/rollout/rollout.py      G trajectories a question, retrieved text among sampled tokens
    score(..)           engine/scoring/score.py        trajectory -> attempt -> entailment, verdicts -> reward
    advantages(..)      engine/packing/batches.py        by group; rewards/advantages.py has the formula
    build_train_sequences(..)      engine/packing/batches.py        what of a trajectory is trained, and its weight in the loss
    updater.update(..)  engine/training/update.py      packed batches through the policy (policy/model.py) and the loss
                                                       (kernels/loss.py), one optimiser step

How it departs from plain GRPO (Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1.1):

- A trajectory holds text that the policy did not write (passages, the engine's feedback). Only sampled tokens are in
  the loss, and 1/|y| counts them alone.
- The old log-prob is the one recorded when the token was sampled. No forward of an old policy is run, unless
  grpo.old_logprobs asks for one (importance.py), and with one update a batch, the default, the ratio is 1 up to
  rounding.
- The group's deviation is the population's, bounded from below by a floor. A group whose rewards are equal, one of a
  single sample included, has advantage 0.
- KL's value and KL's gradient are two settings, each k1, k2 or k3 (the paper's is k3 for both). The reference is the
  model that the run began with, and is never replaced.
- Switches that the paper has not: an upper clip of its own, dual clip, an entropy bonus, weights 1/sum|y| ("token") or
  1/c ("constant") in place of 1/|y|, several optimiser steps or passes a batch, importance weights, and rewards
  shuffled within groups as a control.

Nothing random is carried from step to step: questions, seeds and learning rate are functions of the step's number.
So what comes before an update may be interrupted, and is computed anew; an update that has begun is finished.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from time import perf_counter
from typing import TypeVar

from thresher.engine.assemble import Parts
from thresher.engine.decoding.decoder import NotFiniteDraw
from thresher.engine.packing.batches import (
    LossNormalizer,
    TrainSequence,
    advantages,
    build_train_sequences,
    normalizer_of,
)
from thresher.engine.parallel.first import judging
from thresher.engine.parallel.ranks import ALONE, Ranks
from thresher.engine.protocol.prompts import Fitted, show_passages
from thresher.engine.protocol.trajectory import Trajectory
from thresher.engine.rollout.rollout import Job, Rollout, seed_of
from thresher.engine.scoring.score import Judges, Scored, check_all, score
from thresher.engine.store.token_stats import TokenRecorder
from thresher.engine.training.importance import Recomputed, recompute
from thresher.engine.training.update import Updater, UpdateStats
from thresher.kernels.checks import NotFinite
from thresher.retrieval.questions import Question
from thresher.rewards.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step did on this rank: its scored trajectories with their advantages, and one entry for each optimiser
    step."""

    step: int
    scored: list[Scored]
    advantages: list[float]
    updates: list[UpdateStats]
    recomputed: Recomputed | None
    shown: Fitted
    scoring_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoStep:
    """What every step of a run needs."""

    parts: Parts
    questions: Sequence[Question]
    rollout: Rollout
    judges: Judges
    updater: Updater
    ranks: Ranks = ALONE

    def __call__(self, step: int, recorder: TokenRecorder | None = None) -> StepResult:
        """Step number `step`, counted from 1. recorder: keeps what the first pass over the batch finds of each token.
        Raises Diverged where numbers stop being finite."""
        recipe, parts = self.parts.recipe, self.parts
        size, temperature = recipe.rollout.group_size, recipe.rollout.temperature

        count, updates_per_batch = recipe.rollout.questions_per_step, recipe.grpo.updates_per_batch
        questions = questions_of_step(self.questions, count, recipe.run.seed, step)
        groups = groups_of_rank(count, updates_per_batch, self.ranks)
        questions = [questions[group] for group in groups]
        with self.ranks.interruptible():
            shown = show_passages(questions, parts.system, parts.tools, parts.renderer, self.rollout.retriever)
        jobs = [
            Job(question, group, sample, seed_of(recipe.run.seed, step, group, sample))
            for group, question in zip(groups, shown.questions, strict=True)
            for sample in range(size)
        ]
        with self.updater.weights.rolling_out(), self.ranks.interruptible(), divergence(step):
            trajectories = self.rollout.run(jobs, temperature)

        started = perf_counter()
        with judging(self.judges, self.ranks):
            scored = score([job.question for job in jobs], trajectories, parts.system, parts.tokenizer, self.judges)
        check_all(scored, parts.tokenizer, parts.system.tags, parts.limits.max_context)
        rewards = [entry.result.reward for entry in scored]
        if recipe.grpo.shuffle_rewards:
            rewards = shuffled_rewards(rewards, groups, count, seed_of("shuffle", recipe.run.seed, step))
        advantage = advantages(rewards, [job.group for job in jobs], recipe.grpo)
        scoring_seconds = perf_counter() - started

        bounds = update_bounds(len(groups), size, updates_per_batch)
        totals = totals_of_ranks([trajectories[a:b] for a, b in bounds], self.ranks)
        batch = [
            build_train_sequences(trajectories[a:b], advantage[a:b], recipe.grpo, total)
            for (a, b), total in zip(bounds, totals, strict=True)
        ]
        recomputed = None
        if recipe.grpo.old_logprobs == "recomputed":
            with self.ranks.interruptible():
                batch, recomputed = recompute(self.updater, batch, recipe.grpo, temperature)
        return StepResult(
            step=step,
            scored=scored,
            advantages=advantage,
            updates=self._updates(batch, step, temperature, recorder),
            recomputed=recomputed,
            shown=shown,
            scoring_seconds=scoring_seconds,
        )

    def _updates(
        self, batch: Sequence[list[TrainSequence]], step: int, temperature: float, recorder: TokenRecorder | None
    ) -> list[UpdateStats]:
        """The optimiser steps of a batch: every pass over it takes them in the same order."""
        epochs, updates = self.parts.recipe.grpo.epochs_per_batch, []
        for number, (epoch, items) in enumerate(itertools.product(range(epochs), batch)):
            if self.ranks.most(len(items)) == 0:
                continue  # every group of this step was without a signal, and the recipe drops those
            try:
                place = (step - 1) * epochs * len(batch) + number
                stats = self.updater.update(items, place, temperature, recorder if epoch == 0 else None)
            except NotFinite:  # in a second update of the step; before the first, what was sampled tells
                raise diverged(step, "policy") from None
            stats.epoch = epoch
            updates.append(stats)
            if not math.isfinite(stats.grad_norm):
                raise diverged(step, "gradient")
        return updates


def questions_of_step(questions: Sequence[Question], count: int, seed: int, step: int) -> list[Question]:
    """The step's questions: each pass over the data is shuffled by (seed, pass) and every question comes once in it."""
    chosen = []
    for at in range((step - 1) * count, step * count):
        number, position = divmod(at, len(questions))
        chosen.append(questions[_order(len(questions), seed, number)[position]])
    return chosen


@lru_cache(maxsize=4)
def _order(count: int, seed: int, number: int) -> list[int]:
    order = list(range(count))
    Random(seed_of("questions", seed, number)).shuffle(order)
    return order


def update_bounds(groups: int, size: int, updates: int) -> list[tuple[int, int]]:
    """(start, end) of each optimiser step's trajectories: `groups` groups of `size`, whole, shared out evenly."""
    bounds = [round(number * groups / updates) * size for number in range(updates + 1)]
    return list(itertools.pairwise(bounds))


def totals_of_ranks(batch: Sequence[Sequence[Trajectory]], ranks: Ranks) -> list[LossNormalizer]:
    """Of each optimiser step of a batch, over the trajectories of all ranks."""
    own = [normalizer_of(trajectories) for trajectories in batch]
    counts = ranks.total(*(total.trajectories for total in own))
    tokens = ranks.total(*(total.tokens for total in own))
    return [LossNormalizer(*pair) for pair in zip(counts, tokens, strict=True)]


def groups_of_rank(groups: int, updates: int, ranks: Ranks) -> list[int]:
    """The numbers of this rank's groups: of those of each optimiser step a stretch, as long as every other rank's."""
    return [start + group for start, end in update_bounds(groups, 1, updates) for group in ranks.share(end - start)]


def shuffled_within_groups(rewards: Sequence[T], size: int, seed: int) -> list[T]:
    """The control experiment: rewards that no longer belong to their trajectories, in groups with the same spread."""
    rng, result = Random(seed), list(rewards)
    for start in range(0, len(result), size):
        group = result[start : start + size]
        rng.shuffle(group)
        result[start : start + size] = group
    return result


def shuffled_rewards(rewards: Sequence[float], groups: Sequence[int], count: int, seed: int) -> list[float]:
    """`shuffled_within_groups` of the rewards of these of `count` groups, as it comes out where one rank has them
    all."""
    size = len(rewards) // len(groups)
    order = shuffled_within_groups(range(count * size), size, seed)
    return [
        rewards[(place - group) * size + moved]  # moved counts from group 0
        for place, group in enumerate(groups)
        for moved in order[group * size : (group + 1) * size]
    ]


class Diverged(UserError):
    """Training left the numbers that a float can hold: a result of the recipe, which a study may want to report."""


@contextmanager
def divergence(step: int) -> Iterator[None]:
    """Around sampling in a training run: what the decoder finds not finite, the updates have made so."""
    try:
        yield
    except NotFiniteDraw:
        raise diverged(step, "policy") from None


def diverged(step: int, what: str) -> Diverged:
    return Diverged(
        f"step {step}: the {what} is not finite; start again with a lower optim.lr, a larger grpo.std_floor, or "
        'grpo.kl_value = "k2"'
    )
