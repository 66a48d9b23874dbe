"""One step of asynchrony (run.async): some ranks sample the groups of step s + 1 while the others train on those of s.

    first       sample the groups of step 1 with the initial weights
    step s      ranks that sample                            ranks that train
                sample and score the groups of s + 1,        prepare and learn the groups of s,
                with the weights after step s - 1            which gives the weights after step s
    exchange    the groups of s + 1                     ->
                                                        <-   the weights after step s
    then        evaluate, if due                             wait

The groups of step s are thus sampled with the weights after max(s - 2, 0) steps, independent of timing. The first half
of the ranks trains, at least one rank; it includes rank 0, which writes the run folder.

A checkpoint of step s holds the groups of s + 1, because the weights that sampled them are gone. It stores their logs,
as rollout.partial stores those of unfinished groups (partial.py), and a resumed run replays the logs. The groups after
the last step are sampled too, so that all checkpoints are alike and a run with more steps can continue from the last.

A signal ends a run between two steps, or during an evaluation or the first rollout. It does not end an update, which
cannot be undone and whose result is complete only with the groups that are sampled at the same time.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import reduce

import torch

from thresher.engine.packing import build_train_sequences
from thresher.engine.parallel.ranks import Ranks, trainers_of
from thresher.engine.protocol.prompts import PromptBatch
from thresher.engine.rollout.rollout import RolloutClock
from thresher.engine.scoring.score import Scored, count_tokens
from thresher.engine.store.run_folder import trajectories_of
from thresher.engine.store.token_stats import TokenRecorder
from thresher.engine.training.importance import gap_entries, logprob_gaps
from thresher.engine.training.partial import Counted, Queue
from thresher.engine.training.step import DistributedGrpoStep, Sampled, StepResult
from thresher.rewards.reward import count_words


@dataclass(slots=True, kw_only=True)
class AsyncGrpoStep(DistributedGrpoStep):
    """One rank's step in a run with run.async.

    ranks: the ranks with the same task as this one. everyone: all ranks. trains: whether this rank trains or samples.
    groups_ahead, counted: on ranks that train, the groups of the next step and the counts of their rollouts. ahead: on
    ranks that sample, the queue with these groups.
    """

    everyone: Ranks
    trains: bool
    groups_ahead: Sampled | None = field(default=None, init=False)
    counted: Sequence[Counted] = field(default=(), init=False)
    ahead: Queue | None = field(default=None, init=False)
    begun: bool = field(default=False, init=False)

    def __call__(self, step: int, recorder: TokenRecorder | None = None) -> StepResult | None:
        """Run step number `step`, and sample the groups of the next step. Return the result on a rank that trains."""
        with self.everyone.interruptible():
            pass  # ends the run if a signal arrived during the previous step
        if not self.begun:
            with self.updater.weights.rolling_out():
                pass  # if several ranks train, this frees the whole copy of the weights that each has loaded
            with self.together():
                sampled = None if self.trains else self._sample_ahead(step)
            self._exchange(sampled)
            self.begun = True
        if not self.trains:
            self._exchange(self._sample_ahead(step + 1))
            self._hand_over()
            return None
        assert self.groups_ahead is not None
        result = self.prepare(step, self.groups_ahead)
        self.learn(result, recorder)
        result.beside = gap_record(self.counted)
        result.beside |= self._exchange(None)
        self._hand_over()
        return result

    @property
    def saved_queue(self) -> Queue:
        return self.queue if self.ahead is None else self.ahead

    def together(self) -> AbstractContextManager[None]:
        """Return a context in which a signal to any rank ends the block on all ranks. It has no effect if several ranks
        that sample call one judge in the block, because then none may leave alone."""
        samplers = self.everyone.count - trainers_of(self.everyone.count)
        if samplers > 1 and self.judges.verdict is not None:
            return nullcontext()
        return self.everyone.interruptible()

    def _sample_ahead(self, step: int) -> Sampled:
        """Sample this rank's groups of a future step."""
        self.rollout.tools.place, self.rollout.tools.step = trajectories_of(step), step
        sampled = self.sample(step)
        self.queue, self.ahead = sampled.queue, sampled.played
        counted = sampled.played.counted
        assert counted is not None
        if not counted.gap_tokens:
            self._measure_gap(step, sampled, counted)
        return sampled

    def _measure_gap(self, step: int, sampled: Sampled, counted: Counted) -> None:
        """Measure the gap between recorded log-probs and the update's for the first group with fresh tokens. It is
        measured here because the weights that sampled these tokens are gone by the time of the update."""
        grpo, temperature = self.context.recipe.grpo, self.context.recipe.rollout.temperature
        for scored in sampled.scored.values():
            trajectories = [entry.trajectory for entry in scored]
            sequences = build_train_sequences(
                trajectories, [1.0] * len(scored), grpo, weights_version=self.version(step)
            )
            fresh = [one for one in sequences if one.stale < len(one.positions)]
            if not fresh:
                continue
            gaps = logprob_gaps(fresh, self.updater.logprobs(fresh, temperature))
            counted.gap_tokens, counted.gap, counted.gap_largest = len(gaps), sum(gaps), max(gaps)
            return

    def _exchange(self, sampled: Sampled | None) -> dict[str, float]:
        """Send the sampled groups to the ranks that train. Return, on rank 0, the seconds that each half waited for the
        other."""
        started = time.perf_counter()
        self.everyone.all_reduce_max(0)
        waited = time.perf_counter() - started
        own = None
        if sampled is not None:  # without the queues, whose samples are unfinished
            own = replace(sampled, played=Queue(counted=sampled.played.counted), queue=Queue())
            own.scored = measured_by(count_words, own.scored)  # another process uses its own tokenizer
        gathered = self.everyone.gather((waited, own)) or ()
        if not self.trains:
            return {}
        parts = self.ranks.broadcast(lambda: [part for _, part in gathered if part is not None])
        self.groups_ahead, self.counted = self._share(parts), [each for one in parts if (each := one.played.counted)]
        return wait_record(gathered) if self.everyone.is_main else {}

    def _share(self, parts: Sequence[Sampled]) -> Sampled:
        """Return this rank's groups out of all sampled ones; on rank 0 with the counts of all ranks."""
        scored = {group: entries for part in parts for group, entries in part.scored.items()}
        own = measured_by(count_tokens(self.context.tokenizer), {group: scored[group] for group in self.groups})
        if not self.ranks.is_main:
            return Sampled(scored=own, shown=PromptBatch([], 0, 0, 0), clock=RolloutClock(), scoring_seconds=0.0)
        return Sampled(
            scored=own,
            shown=reduce(PromptBatch.merged, (part.shown for part in parts)),
            clock=parallel_clock([part.clock for part in parts]),
            scoring_seconds=max(part.scoring_seconds for part in parts),
            rounds=max(part.rounds for part in parts),
            replaced=sum(part.replaced for part in parts),
            tokens_replaced=sum(part.tokens_replaced for part in parts),
        )

    @torch.no_grad()
    def _hand_over(self) -> None:
        """Send the weights from the ranks that train to those that sample, in the dtype of the computation. For a
        policy with adapters, only the adapters are sent."""
        policy = self.rollout.policy
        with self.updater.weights.rolling_out():
            for name, parameter in policy.named_parameters():
                if policy.lora is None or ".adapters." in name:
                    torch.distributed.broadcast(parameter, 0)
                    torch.autograd.graph.increment_version(parameter)  # the decoder detects an update by it


def measured_by(length: Callable[[str], int], scored: Mapping[int, list[Scored]]) -> dict[int, list[Scored]]:
    """Return the groups with `length` as the length function of their rewards."""
    return {
        group: [replace(entry, attempt=replace(entry.attempt, length=length)) for entry in entries]
        for group, entries in scored.items()
    }


def parallel_clock(clocks: Sequence[RolloutClock]) -> RolloutClock:
    """Return the seconds of the longest rollout, and the summed counts of all."""
    slowest = max(clocks, key=lambda clock: clock.total)
    values = {each.name: [getattr(clock, each.name) for clock in clocks] for each in fields(RolloutClock)}
    return replace(slowest, **{name: sum(of) for name, of in values.items() if isinstance(of[0], int)})


def wait_record(gathered: Sequence[tuple[float, Sampled | None]]) -> dict[str, float]:
    """Return the seconds that each half waited for the other, counted from the arrival of its last rank. gathered: for
    each rank its seconds and the groups that it sampled; None: it trains."""
    return {
        "trainer_wait_seconds": min(seconds for seconds, sampled in gathered if sampled is None),
        "sampler_wait_seconds": min(seconds for seconds, sampled in gathered if sampled is not None),
    }


def gap_record(counted: Sequence[Counted]) -> dict[str, float]:
    """Return the record entries of the gap between recorded and recomputed log-probs; {} if no token was measured."""
    largest = max((each.gap_largest for each in counted), default=0.0)
    return gap_entries(sum(each.gap_tokens for each in counted), sum(each.gap for each in counted), largest)
