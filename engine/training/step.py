"""One GRPO step, top to bottom: draw questions, roll out, score, advantage, update.

    collect   rollout.run              engine/rollout/rollout.py    G trajectories per question, with retrieved text
              score                    engine/scoring/score.py      trajectory -> RewardInput -> judges -> reward
              advantages               rewards/advantages.py          each reward within its group; training/credit.py:
                                                                      one per token, by rewards/credit.py
              build_train_sequences    engine/packing.py              what is trained, and its weight in the loss
    learn     updater.update           engine/training/update.py    micro-batches through the policy (policy/model.py)
                                                                    and the loss (kernels/loss.py); an optimiser step

Differences from plain GRPO (Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1.1):

- A trajectory contains text that the policy did not write (passages, the engine's feedback). Only sampled tokens are in
  the loss, and 1/|y| counts only them.
- The old log-prob is the one recorded when the token was sampled. No forward of an old policy is run, unless
  grpo.old_logprobs requests one (importance.py). With one update per rollout batch, the default, the ratio is 1 up to
  rounding.
- The group's deviation is the population's, bounded from below by a floor. A group whose rewards are equal, including a
  group of a single sample, has advantage 0.
- The KL's value and the KL's gradient are two settings, each k1, k2 or k3 (the paper's is k3 for both). The reference
  is the model that the run began with, and is never replaced.
- Switches that the paper does not have: a separate upper clip, dual clip, an entropy bonus, weights 1/sum|y| ("token")
  or 1/c ("constant") in place of 1/|y|, several optimiser steps or passes per rollout batch, importance weights, other
  questions for groups without a signal (`grpo.refill`, DAPO's dynamic sampling), and rewards shuffled within groups as
  a control.

No random state is carried from step to step: questions, seeds and learning rate are functions of the step's number, and
those of a refill of (seed, step, round, group). With rollout.partial, groups span several steps (partial.py). An
interrupted `collect` is run again; `learn` is finished once it has begun.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from random import Random
from statistics import fmean
from time import perf_counter
from typing import Any, TypeVar

from thresher.common.errors import UserError
from thresher.engine.assemble import RunContext
from thresher.engine.decoding.decoder import NotFiniteDraw
from thresher.engine.packing import LossNormalizer, TrainSequence, build_train_sequences, grpo_advantages, normalizer_of
from thresher.engine.parallel.ranks import Ranks
from thresher.engine.parallel.sync import judging
from thresher.engine.protocol.prompts import PromptBatch
from thresher.engine.protocol.trajectory import Trajectory, sampled_tokens
from thresher.engine.rollout.rollout import Group, Job, Rollout, RolloutClock, seed_of
from thresher.engine.rollout.trees import TreeShape
from thresher.engine.rollout.unfinished import RecordedDraws, play_on
from thresher.engine.scoring.score import Judges, Scored, check_all, score
from thresher.engine.store.token_stats import TokenRecorder
from thresher.engine.training.credit import branch_advantages, branch_rewards, token_advantages
from thresher.engine.training.importance import RecomputedLogprobs, recompute_logprobs
from thresher.engine.training.partial import Counted, Queue, Taking, restore
from thresher.engine.training.update import Updater, UpdateStats
from thresher.kernels.operands import NotFinite
from thresher.retrieval.questions import Question
from thresher.rewards.reward import Source

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Sampled:
    """Scored trajectories of a step by group, and the counts and times of all rounds that sampled them.

    shown, clock, scoring_seconds: of all rounds. replaced: number of groups that were set aside for others.
    tokens_replaced: number of tokens sampled for these. played: the queue with the step's groups, which are complete.
    queue: the queue without them, after the step.
    """

    scored: dict[int, list[Scored]]
    shown: PromptBatch
    clock: RolloutClock
    scoring_seconds: float
    rounds: int = 1
    replaced: int = 0
    tokens_replaced: int = 0
    played: Queue = field(default_factory=Queue)
    queue: Queue = field(default_factory=Queue)

    def add_round(self, later: "Sampled") -> None:
        """Replace groups by those of a later round with the same numbers."""
        replaced = itertools.chain(*(self.scored[group] for group in later.scored))
        self.tokens_replaced += sum(sampled_tokens(entry.trajectory) for entry in replaced)
        self.scored |= later.scored
        self.replaced += len(later.scored)
        self.rounds += 1
        self.scoring_seconds += later.scoring_seconds
        self.shown, self.clock = self.shown.merged(later.shown), sum_clocks(self.clock, later.clock)


def sum_clocks(one: RolloutClock, other: RolloutClock) -> RolloutClock:
    return RolloutClock(**{each.name: getattr(one, each.name) + getattr(other, each.name) for each in fields(one)})


@dataclass(slots=True, kw_only=True)
class StepResult:
    """A step's scored trajectories with their advantages, and one entry of `updates` for each optimiser step.

    sequences_by_update: the sequences of each optimiser step in one pass over the trajectories. recomputed: see
    importance.py. sampled: the groups to train on, with the counts of all rounds. beside: further entries of the step's
    record.
    """

    step: int
    scored: list[Scored]
    advantages: list[float]
    sequences_by_update: list[list[TrainSequence]]
    credit: list[list[float]] | None  # the advantage of each trained token; None: its trajectory's
    recomputed: RecomputedLogprobs | None
    sampled: Sampled
    scoring_seconds: float
    updates: list[UpdateStats] = field(default_factory=list)
    beside: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class GrpoStep:
    """A step of a run in one process; `DistributedGrpoStep` is that of several ranks.

    collecting: True while `collect` runs; an interrupt then loses nothing. queue: with rollout.partial, the queue after
    the last learned step; on ranks that only sample, after the last sampled step. recorded: the draws of a run that is
    replayed.
    """

    context: RunContext
    questions: Sequence[Question]
    rollout: Rollout
    judges: Judges
    updater: Updater
    collecting: bool = field(default=False, init=False)
    queue: Queue = field(default_factory=Queue, init=False)
    recorded: RecordedDraws | None = field(default=None, init=False)
    weights_version: int = field(default=0, init=False)  # the first version with the current weights

    def __call__(self, step: int, recorder: TokenRecorder | None = None) -> StepResult | None:
        """Run step number `step`, counted from 1; return None on a rank that does not train (asynchronous.py).
        recorder: records the values of each token in the first pass over the trajectories. Raises Diverged if a number
        is not finite."""
        self.collecting = True
        try:
            result = self.collect(step)
        finally:
            self.collecting = False
        return self.learn(result, recorder)

    def collect(self, step: int) -> StepResult:
        """Sample and score the trajectories of a step, and build the sequences to train on. No weights are changed, so
        an interrupted call is simply repeated."""
        return self.prepare(step, self.sample(step))

    def sample(self, step: int) -> Sampled:
        """Sample and score this process's groups of a step."""
        recipe = self.context.recipe
        groups = self.groups
        if recipe.rollout.partial or recipe.run.async_:
            return self._sample_next(step, groups, self.queue.copied())  # an interrupted call leaves it unchanged
        questions = questions_of_step(self.questions, recipe.rollout.questions_per_step, recipe.run.seed, step)
        sampled = self._sample_groups(step, {group: questions[group] for group in groups})
        if recipe.grpo.refill:
            self._refill(step, sampled)
        return sampled

    @property
    def groups(self) -> list[int]:
        """Return the numbers of this process's groups within each step."""
        return list(range(self.context.recipe.rollout.questions_per_step))

    def version(self, step: int) -> int:
        """Return the number of steps learned by the weights that sample the groups of a step."""
        return max(step - 2, 0) if self.context.recipe.run.async_ else step - 1

    def prepare(self, step: int, sampled: Sampled) -> StepResult:
        """Compute the advantages of a step's groups, and build the sequences to train on. Old log-probs are recomputed
        with the current weights if the recipe says so."""
        grpo = self.context.recipe.grpo
        size, updates = self.context.recipe.rollout.group_size, grpo.updates_per_batch
        started = perf_counter()
        scored = list(itertools.chain(*sampled.scored.values()))
        trajectories = [entry.trajectory for entry in scored]
        advantages, credit = self._advantages(step, scored)
        if credit is not None and grpo.advantage != "trajectory":
            advantages = [fmean(values) if values else 0.0 for values in credit]
        scoring_seconds = sampled.scoring_seconds + perf_counter() - started
        with_signal = groups_with_signal(scored, credit or advantages)
        alive = [trajectory.group in with_signal for trajectory in trajectories]
        by_update = [range(a, b) for a, b in update_bounds(len(sampled.scored), size, updates)]
        counted = [[n for n in part if alive[n] or grpo.count_zero_advantage_groups] for part in by_update]
        # A group without a signal after all rounds of a refill is counted, but not trained on.
        trained = [[n for n in part if alive[n] or not grpo.refill] for part in counted]
        normalizers = self._normalizers([normalizer_of([trajectories[n] for n in part]) for part in counted])
        sequences_by_update = [
            build_train_sequences(
                [trajectories[n] for n in part],
                [(credit or advantages)[n] for n in part],
                grpo,
                normalizer,
                self.weights_version,
            )
            for part, normalizer in zip(trained, normalizers, strict=True)
        ]
        recomputed = None
        if grpo.old_logprobs == "recomputed":
            sequences_by_update, recomputed = self._recompute_logprobs(sequences_by_update)
        return StepResult(
            step=step,
            scored=scored,
            advantages=advantages,
            credit=credit,
            sequences_by_update=sequences_by_update,
            recomputed=recomputed,
            sampled=sampled,
            scoring_seconds=scoring_seconds,
        )

    def _sample_groups(self, step: int, questions: dict[int, Question], number: int = 1) -> Sampled:
        """Sample and score a round's groups. questions: by group number. number: that of the round."""
        recipe = self.context.recipe
        size, refill = recipe.rollout.group_size, () if number == 1 else ("refill", number)
        shown = self._show_passages(list(questions.values()))
        jobs = [
            Job(question, group, sample, seed_of(*refill, recipe.run.seed, step, group, sample))
            for group, question in zip(questions, shown.questions, strict=True)
            for sample in range(size)
        ]
        with divergence(step):
            trajectories = self._roll_out(jobs)
        started = perf_counter()
        scored = self._score(jobs, trajectories)
        check_all(scored, self.context.tokenizer, self.context.system.tags, self.context.limits.max_context)
        return Sampled(
            scored={group: scored[at * size : (at + 1) * size] for at, group in enumerate(questions)},
            shown=shown,
            clock=self.rollout.clock,
            scoring_seconds=perf_counter() - started,
        )

    def _sample_next(self, step: int, groups: Sequence[int], queue: Queue) -> Sampled:
        """Play the queue until the step's groups are complete, and take them (partial.py)."""
        recipe, grpo = self.context.recipe, self.context.recipe.grpo
        count, in_flight = len(groups), recipe.rollout.in_flight * len(groups) // recipe.rollout.questions_per_step
        last = None if self.recorded is None else self.recorded.steps * count
        taking = Taking(queue, count, in_flight, count * (grpo.refill_rounds if grpo.refill else 1), last)
        shown = PromptBatch([], 0, 0, 0)

        def more(complete: list[Group]) -> list[Group] | None:
            nonlocal shown
            if grpo.refill:
                taking.without_signal |= self._score_complete(step, complete, queue)
            if taking.over():
                return None
            if not (due := taking.due()):
                return []
            new, passages = self.groups_of(due, groups, self.version(step) if recipe.rollout.stale_cache else 0)
            shown = passages.merged(shown)
            queue.groups |= new
            return list(new.values())

        unfinished = [group for group in queue.groups.values() if group.trajectories is None]
        if grpo.refill:
            ended = [group for group in queue.groups.values() if group.trajectories is not None]
            taking.without_signal = self._score_complete(step, ended, queue)
        with divergence(step):
            self._go_on(unfinished, self.version(step), more)
        counted = Counted(self.rollout.clock, shown.cut_passages)
        if self.queue.counted is not None:  # the groups were complete in a checkpoint; only their logs were replayed
            counted, self.rollout.kept = self.queue.counted, None
        played = replace(queue, groups=dict(queue.groups), counted=counted)
        taken, set_aside = taking.take()
        trajectories = [one for group in taken.values() for one in group.trajectories or ()]
        started = perf_counter()
        if grpo.refill:
            scored = [entry for number in taken for entry in queue.scored[number]]
            queue.scored = {number: known for number, known in queue.scored.items() if number >= queue.next}
        else:
            scored = self._score([job for group in taken.values() for job in group.jobs], trajectories)
        check_all(scored, self.context.tokenizer, self.context.system.tags, self.context.limits.max_context)
        size = recipe.rollout.group_size
        for place, trajectory in enumerate(trajectories):
            trajectory.group = groups[place // size]
        return Sampled(
            scored={group: scored[at * size : (at + 1) * size] for at, group in enumerate(groups)},
            shown=replace(shown, cut_passages=counted.cut_passages),
            clock=counted.clock,
            scoring_seconds=perf_counter() - started,
            rounds=-(-(len(taken) + len(set_aside)) // count),
            replaced=len(set_aside),
            tokens_replaced=sum(sampled_tokens(one) for group in set_aside for one in group.trajectories or ()),
            played=played,
            queue=queue,
        )

    def groups_of(
        self, numbers: Sequence[int], groups: Sequence[int], version: int = 0
    ) -> tuple[dict[int, Group], PromptBatch]:
        """Return the groups with these numbers in the queue, not begun yet, and their questions as shown in prompts.
        groups: this process's numbers within each step. version: their `Group.version`."""
        recipe = self.context.recipe
        places = [(number // len(groups) + 1, groups[number % len(groups)]) for number in numbers]
        per_step, seed = recipe.rollout.questions_per_step, recipe.run.seed
        asked = [questions_of_step(self.questions, per_step, seed, step)[group] for step, group in places]
        shown = self.rollout.retrieve_and_truncate(asked)
        found = {}
        for number, question, (step, group) in zip(numbers, shown.questions, places, strict=True):
            jobs = [Job(question, group, n, seed_of(seed, step, group, n)) for n in range(recipe.rollout.group_size)]
            found[number] = Group(jobs, version=version, step=step)
        return found, shown

    def restore(self, queue: Queue, records: Mapping[int, Mapping[str, Any]]) -> None:
        """Restore the queue of a checkpoint (`read_queue`)."""
        groups = self.groups_of(list(records), self.groups)[0] if records else {}
        restored = {number: restore(groups[number], record) for number, record in records.items()}
        self.queue = replace(queue, groups=restored)

    def _score_complete(self, step: int, complete: Sequence[Group], queue: Queue) -> set[int]:
        """Score groups that have become complete; return the numbers of those without a signal."""
        numbers = {group: number for number, group in queue.groups.items()}
        without = set()
        for group in complete:
            number, questions = numbers[group], [job.question for job in group.jobs]
            trajectories = group.trajectories or []
            if number not in queue.scored:
                found = score(questions, trajectories, self.context.system, self.context.tokenizer, self.judges)
                queue.scored[number] = found
            advantages, credit = self._advantages(step, queue.scored[number])
            if not groups_with_signal(queue.scored[number], credit or advantages):
                without.add(number)
        return without

    def _refill(self, step: int, sampled: Sampled) -> None:
        """Replace groups without a signal, round by round, by groups of other questions (DAPO, 2503.14476, eq. 11)."""
        recipe = self.context.recipe
        for number in range(2, recipe.grpo.refill_rounds + 1):
            drawn = refill_questions(self.questions, recipe.rollout.questions_per_step, recipe.run.seed, step, number)
            scored = list(itertools.chain(*sampled.scored.values()))
            advantages, credit = self._advantages(step, scored)
            kept = groups_with_signal(scored, credit or advantages)
            questions = {group: drawn[group] for group in sampled.scored if group not in kept and group < len(drawn)}
            if self._max_over_ranks(len(questions)) == 0:
                return
            sampled.add_round(self._sample_groups(step, questions, number))

    def _advantages(self, step: int, scored: Sequence[Scored]) -> tuple[list[float], list[list[float]] | None]:
        """Return the advantage of each trajectory, and of each of its trained tokens where they differ."""
        recipe, grpo = self.context.recipe, self.context.recipe.grpo
        groups, seed = [entry.trajectory.group for entry in scored], seed_of("shuffle", recipe.run.seed, step)
        rewards = self._rewards(scored)
        if grpo.shuffle_rewards:
            numbers = list(dict.fromkeys(groups))
            rewards = shuffled_rewards(rewards, numbers, recipe.rollout.questions_per_step, seed)
        of_branches: list[dict[str, float]] = [{} for _ in scored]
        if any(entry.result.branches for entry in scored):
            of_branches = branch_rewards(scored, grpo.shuffle_rewards, seed)
        first, compared = 0, list(zip(rewards, groups, of_branches, strict=True))
        if "batch" in (grpo.baseline, grpo.scale):
            first, compared = self._of_all_ranks(compared)
        own = slice(first, first + len(rewards))
        groups_of_all = [group for _, group, _ in compared]
        advantages = grpo_advantages([reward for reward, _, _ in compared], groups_of_all, grpo)[own]
        if grpo.advantage == "trajectory" and not any(of_branches):
            return advantages, None
        branches = branch_advantages([rewards for _, _, rewards in compared], groups_of_all, grpo)[own]
        return advantages, token_advantages(scored, rewards, advantages, branches, grpo, self.context.tokenizer, seed)

    def _rewards(self, scored: Sequence[Scored]) -> list[float]:
        """Return the rewards from which advantages are computed."""
        rewards, buffer = [entry.result.reward for entry in scored], self.context.recipe.grpo.overlong_tokens
        if not buffer:
            return rewards
        most = self.context.recipe.rollout.policy_tokens
        lengths = (entry.trajectory.count(Source.POLICY) for entry in scored)
        return [r - overlong_penalty(n, most, buffer) for r, n in zip(rewards, lengths, strict=True)]

    def learn(self, result: StepResult, recorder: TokenRecorder | None = None) -> StepResult:
        """Run the optimiser steps, in the same order in every pass over the trajectories. Return `result` with its
        `updates`."""
        recipe, step = self.context.recipe, result.step
        epochs, count = recipe.grpo.epochs_per_batch, len(result.sequences_by_update)
        for number, (epoch, sequences) in enumerate(itertools.product(range(epochs), result.sequences_by_update)):
            try:
                place = (step - 1) * epochs * count + number
                seen = recorder if epoch == 0 else None
                moved = any(update.moved for update in result.updates)
                stats = self.updater.update(sequences, place, recipe.rollout.temperature, seen, moved)
            except NotFinite:  # in a later update of the step; before the first, sampling would have failed
                raise diverged(step, "policy") from None
            if stats is None:
                continue  # no group of this step has a signal, and the recipe drops such groups
            stats.epoch = epoch
            result.updates.append(stats)
            if not math.isfinite(stats.grad_norm):
                raise diverged(step, "gradient")
            if stats.moved:
                self.weights_version = step
        self.queue = result.sampled.queue
        return result

    @property
    def saved_queue(self) -> Queue:
        """Return the queue that a checkpoint stores."""
        return self.queue

    # --- Joint operations of several ranks

    def together(self) -> AbstractContextManager[None]:
        """Return a context for work that some ranks do while the others wait (asynchronous.py)."""
        return nullcontext()

    def _max_over_ranks(self, count: int) -> int:
        return count

    def _of_all_ranks(self, own: list[T]) -> tuple[int, list[T]]:
        """Return the index of this rank's first item among those of all ranks, and the items of all."""
        return 0, own

    def _show_passages(self, questions: Sequence[Question]) -> PromptBatch:
        return self.rollout.retrieve_and_truncate(questions)

    def _roll_out(self, jobs: Sequence[Job]) -> list[Trajectory]:
        rollout = self.context.recipe.rollout
        shape = TreeShape(rollout.trees, rollout.tree_nodes) if rollout.trees else None
        return self.rollout.run(jobs, rollout.temperature, shape=shape)

    def _go_on(
        self, unfinished: Sequence[Group], version: int, more: Callable[[list[Group]], list[Group] | None]
    ) -> None:
        rollout = self.context.recipe.rollout
        shape = TreeShape(rollout.trees, rollout.tree_nodes) if rollout.trees else None
        play_on(self.rollout, unfinished, rollout.temperature, version, more, shape, rollout.stale_cache, self.recorded)

    def _score(self, jobs: Sequence[Job], trajectories: Sequence[Trajectory]) -> list[Scored]:
        asked = [job.question for job in jobs]
        return score(asked, trajectories, self.context.system, self.context.tokenizer, self.judges)

    def _normalizers(self, own: list[LossNormalizer]) -> list[LossNormalizer]:
        """Return the normalizer of each optimiser step, over the trajectories of all ranks."""
        return own

    def _recompute_logprobs(
        self, by_update: list[list[TrainSequence]]
    ) -> tuple[list[list[TrainSequence]], RecomputedLogprobs]:
        recipe = self.context.recipe
        return recompute_logprobs(self.updater, by_update, recipe.grpo, recipe.rollout.temperature)


def weights_moved(records: Sequence[Mapping[str, Any]], weight_decay: float) -> tuple[int, bool]:
    """Return the last step that moved the weights (0: none yet), and whether there has been a gradient.

    records: those of a run's steps. Without a gradient the moments are 0, and only weight decay moves the weights.
    """
    since, moving = 0, False
    for record in records:
        norm = record.get("grad_norm")
        if norm is not None:
            moving |= norm > 0
            if (record.get("lr") or 0.0) > 0 and (moving or weight_decay > 0):
                since = record["step"]
    return since, moving


def overlong_penalty(length: int, most: int, buffer: int) -> float:
    """Return the penalty for a trajectory of `length` sampled tokens (DAPO, 2503.14476, eq. 13). It is 0 up to `most -
    buffer`, 1 at `most` and beyond, and linear between."""
    return min(max((length - (most - buffer)) / buffer, 0.0), 1.0)


@dataclass(slots=True, kw_only=True)
class DistributedGrpoStep(GrpoStep):
    """`GrpoStep` on one of several ranks. It samples this rank's share of the groups; sums are over all ranks.

    A signal to any rank ends a rollout, a search or a judge's call on all ranks (`Ranks.interruptible`).
    """

    ranks: Ranks

    @property
    def groups(self) -> list[int]:
        recipe = self.context.recipe
        return groups_of_rank(recipe.rollout.questions_per_step, recipe.grpo.updates_per_batch, self.ranks)

    def _max_over_ranks(self, count: int) -> int:
        return self.ranks.all_reduce_max(count)

    def _of_all_ranks(self, own: list[T]) -> tuple[int, list[T]]:
        gathered = self.ranks.gather(own)
        parts = self.ranks.broadcast(lambda: gathered) or []
        return sum(map(len, parts[: self.ranks.rank])), list(itertools.chain.from_iterable(parts))

    def _show_passages(self, questions: Sequence[Question]) -> PromptBatch:
        with self.ranks.interruptible():
            return GrpoStep._show_passages(self, questions)

    def _roll_out(self, jobs: Sequence[Job]) -> list[Trajectory]:
        with self.updater.weights.rolling_out(), self.ranks.interruptible():
            return GrpoStep._roll_out(self, jobs)

    def _go_on(
        self, unfinished: Sequence[Group], version: int, more: Callable[[list[Group]], list[Group] | None]
    ) -> None:
        with self.updater.weights.rolling_out(), self.ranks.interruptible():
            GrpoStep._go_on(self, unfinished, version, more)

    def _score(self, jobs: Sequence[Job], trajectories: Sequence[Trajectory]) -> list[Scored]:
        with judging(self.judges, self.ranks):
            return GrpoStep._score(self, jobs, trajectories)

    def _normalizers(self, own: list[LossNormalizer]) -> list[LossNormalizer]:
        counts = self.ranks.all_reduce_sum(*(one.trajectories for one in own))
        tokens = self.ranks.all_reduce_sum(*(one.tokens for one in own))
        return [LossNormalizer(*pair) for pair in zip(counts, tokens, strict=True)]

    def _recompute_logprobs(
        self, by_update: list[list[TrainSequence]]
    ) -> tuple[list[list[TrainSequence]], RecomputedLogprobs]:
        found = GrpoStep._recompute_logprobs(self, by_update)  # has collectives, so no signal may end it
        with self.ranks.interruptible():
            return found


def groups_of_rank(groups: int, updates: int, ranks: Ranks) -> list[int]:
    """Return the numbers of this rank's groups: a part of each optimiser step's, equally long on all ranks."""
    return [start + group for start, end in update_bounds(groups, 1, updates) for group in ranks.share(end - start)]


def groups_with_signal(scored: Sequence[Scored], advantages: Sequence[float | list[float]]) -> set[int]:
    """Return the numbers of the groups in which the advantage of a trajectory or of a token is not 0."""
    pairs = zip(scored, advantages, strict=True)
    return {entry.trajectory.group for entry, of in pairs if (any(of) if isinstance(of, list) else of)}


def questions_of_step(questions: Sequence[Question], count: int, seed: int, step: int) -> list[Question]:
    """Return the step's questions. Each pass over the data is shuffled by (seed, pass) and has every question once."""
    return [questions[place] for place in _places(len(questions), count, seed, step)]


def refill_questions(questions: Sequence[Question], count: int, seed: int, step: int, number: int) -> list[Question]:
    """Return the questions of round `number` of a step, from 2 on, by group number. They are `count` consecutive ones
    of all questions except the step's own, shuffled by (seed, step). At the end of the data there are fewer."""
    order = _refill_order(len(questions), count, seed, step)
    return [questions[place] for place in order[(number - 2) * count : (number - 1) * count]]


def _places(total: int, count: int, seed: int, step: int) -> list[int]:
    places = (divmod(at, total) for at in range((step - 1) * count, step * count))
    return [_order(total, seed, number)[position] for number, position in places]


@lru_cache(maxsize=1)
def _refill_order(total: int, count: int, seed: int, step: int) -> list[int]:
    order = sorted(set(range(total)) - set(_places(total, count, seed, step)))
    Random(seed_of("refill", seed, step)).shuffle(order)
    return order


@lru_cache(maxsize=4)
def _order(count: int, seed: int, number: int) -> list[int]:
    order = list(range(count))
    Random(seed_of("questions", seed, number)).shuffle(order)
    return order


def update_bounds(groups: int, size: int, updates: int) -> list[tuple[int, int]]:
    """Return (start, end) of each optimiser step's trajectories: `groups` whole groups of `size`, divided evenly."""
    bounds = [round(number * groups / updates) * size for number in range(updates + 1)]
    return list(itertools.pairwise(bounds))


def shuffled_rewards(rewards: Sequence[float], groups: Sequence[int], count: int, seed: int) -> list[float]:
    """Return the rewards of a control experiment, shuffled within each of these groups. The order is that of one rank
    with all `count` groups."""
    rng, size = Random(seed), len(rewards) // len(groups)
    orders = [list(range(size)) for _ in range(count)]
    for order in orders:
        rng.shuffle(order)
    return [rewards[place * size + moved] for place, group in enumerate(groups) for moved in orders[group]]


class Diverged(UserError):
    """Error for numbers of training that are not finite: a result of the recipe, which a study may report."""


@contextmanager
def divergence(step: int) -> Iterator[None]:
    """Turn a `NotFiniteDraw` within a training run into `Diverged`, because the updates caused it."""
    try:
        yield
    except NotFiniteDraw:
        raise diverged(step, "policy") from None


def diverged(step: int, what: str) -> Diverged:
    return Diverged(
        f"step {step}: the {what} is not finite; start again with a lower optim.lr, a larger grpo.std_floor, or "
        'grpo.kl_value = "k2"'
    )
