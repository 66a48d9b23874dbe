"""`thresher bench rollout --shape tail`: rollouts whose samples are not equally long, with and without rollout.partial.

Lengths are the quantiles of a lognormal distribution in a random order (planning/tail.py: `tail_lengths`,
`lengths_of_run`). They are forced: a sample's question names its length, and random weights do not stop. The weights
stay the same, but each rollout begins with an empty cache, as after an update, so that unfinished samples are prefilled
again. Without rollout.partial Q groups are in flight, so each rollout lasts as long as its longest sample; with it F.
The sides take turns. The first and last `AROUND` rollouts of a run fill and empty the slots; no figure has them.

Before anything is timed all sides are played once without shared prefixes, on a CPU: every rollout's decode steps,
drawn tokens and their staleness have to be those of `count_rollouts`. With shared prefixes a sample waits for its
prompt, and one of a later group may take the slot, so that counts differ a little; both are in the row.

    seconds = a x decode steps + b x tokens drawn + c x tokens prefilled

a, b and c are least squares over the decode steps of all timed runs. The predicted ratio is that of both sides' counts.
"""

import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from thresher.bench.harness import facts, spread, spread_text
from thresher.bench.rollout_sides import STOP, RolloutSide, Written
from thresher.bench.settings import RolloutSetting
from thresher.common.console import table
from thresher.engine.episode import Episode, EpisodeConfig, Generate, Prompt
from thresher.engine.planning import tail
from thresher.engine.protocol.trajectory import Trajectory, turns
from thresher.engine.rollout.rollout import Group, Job
from thresher.engine.rollout.unfinished import play_on
from thresher.engine.training.partial import Queue, Taking
from thresher.retrieval.questions import Question

FACTORS = (2, 3, 5)  # F by Q
STEPS = 20  # rollouts of a run that figures are taken of
AROUND = 2 * max(FACTORS)  # before them, and behind

Counts = tuple[int, int, int]  # decode steps, tokens drawn, tokens prefilled


@dataclass(slots=True)
class Played:
    """A side's run: by rollout its seconds, counts, and tokens prefilled again; (seconds, counts) of stretches of its
    decode steps; and by the rollout that trains on them, how many tokens have which staleness."""

    seconds: list[float] = field(default_factory=list)
    counts: list[Counts] = field(default_factory=list)
    again: list[int] = field(default_factory=list)
    stretches: list[tuple[float, Counts]] = field(default_factory=list)
    staleness: list[Counter[int]] = field(default_factory=list)

    def middle(self) -> tuple[float, Counts]:
        """Return seconds and counts of the rollouts that figures are taken of."""
        return sum(self.seconds[AROUND:-AROUND]), _sum(self.counts[AROUND:-AROUND])


class TailSide(RolloutSide):
    """The engine's rollouts around an episode of one turn, which has the length of its sample. A shape's only turn is
    the longest length."""

    def __init__(self, setting: RolloutSetting, reuse: bool = True) -> None:
        super().__init__(setting, reuse)
        shape, rollouts = setting.shape, STEPS + 2 * AROUND
        (longest,) = shape.turns
        samples = rollouts * shape.samples
        quantiles = tail.tail_lengths(tail.MEAN_SHARE * longest, longest, samples=samples)
        self.lengths = tail.lengths_of_run(quantiles, samples)
        self.groups = rollouts * shape.questions
        self.last: list[Trajectory] = []  # those of the last rollout played

    def expected(self, factor: int) -> list[tail.RolloutCounts]:
        """Return the counts of each rollout with `factor` times the groups of a step in flight."""
        shape = self.setting.shape
        queue = tail.Queue(shape.group, shape.questions, factor * shape.questions, shape.samples)
        return tail.count_rollouts(self.lengths, queue)

    def play(self, factor: int) -> Played:
        """Play a run with `factor` times the groups of a step in flight; 1 is without rollout.partial."""
        played, queue, count = Played(), Queue(), self.setting.shape.questions
        for number in range(self.groups // count):
            marks: list[tuple[float, Counts]] = []
            if factor == 1:
                first = number * count
                jobs = [job for group in range(first, first + count) for job in self._jobs(group)]
                self.last = self.rollout.run(jobs, 1.0, on_progress=lambda _, marks=marks: self._mark(marks))
            else:
                self.last = self._play_next(number, factor, queue, marks)
            clock = self.rollout.clock
            played.seconds.append(clock.total)
            played.counts.append(self._counts())
            played.again.append(clock.tokens_recomputed)
            differences = zip(marks, marks[1:], strict=False)
            played.stretches += [(b - a, _sum([y, _negative(x)])) for (a, x), (b, y) in differences]
            played.staleness.append(self._staleness(number))
        return played

    def _play_next(
        self, number: int, factor: int, queue: Queue, marks: list[tuple[float, Counts]]
    ) -> list[Trajectory]:
        """Play the queue on until the groups of this rollout are complete; return their trajectories."""
        count = self.setting.shape.questions
        taking = Taking(queue, count, min(factor * count, self.groups - queue.next), count)

        def more(complete: list[Group]) -> list[Group] | None:
            self._mark(marks)
            if taking.over():
                return None
            new = {group: Group(self._jobs(group)) for group in taking.due()}
            queue.groups |= new
            return list(new.values())

        unfinished = [group for group in queue.groups.values() if group.trajectories is None]
        play_on(self.rollout, unfinished, 1.0, number, more)
        taken, _ = taking.take()
        return [one for group in taken.values() for one in group.trajectories or ()]

    def _jobs(self, group: int) -> list[Job]:
        size, texts = self.setting.shape.group, self.setting.questions
        numbers = range(group * size, (group + 1) * size)
        return [Job(Question(f"q{n}", texts[group % len(texts)], ()), group, n - numbers.start, n) for n in numbers]

    def _episode(self, question: Question, config: EpisodeConfig) -> Episode:
        yield Prompt(config.template, question.question, [])
        yield Generate((STOP,), self.lengths[int(question.id[1:])])
        return "ended"

    def _counts(self) -> Counts:
        clock = self.rollout.clock
        return clock.slots // self.setting.shape.samples, clock.busy_slots, clock.prefilled_tokens

    def _mark(self, marks: list[tuple[float, Counts]]) -> None:
        marks.append((time.perf_counter(), self._counts()))

    def _staleness(self, number: int) -> Counter[int]:
        """Return how many tokens of the last rollout's trajectories have which staleness. RuntimeError for a sample of
        another length than was asked for."""
        found = Counter[int]()
        for one in self.last:
            (turn,) = turns(one)
            if len(turn.ids) != (asked := self.lengths[int(one.question_id[1:])]):
                raise RuntimeError(f"a sample of {asked} tokens was asked for, {len(turn.ids)} came ({one.reason})")
            for version, tokens in turn.versions or [(number, len(turn.ids))]:
                found[number - version] += tokens
        return found


def _sum(counts: Sequence[Counts]) -> Counts:
    steps, drawn, prefilled = (sum(column) for column in zip(*counts, strict=True))
    return steps, drawn, prefilled


def _negative(counts: Counts) -> Counts:
    return -counts[0], -counts[1], -counts[2]


def check_counts(played: Played, expected: Sequence[tail.RolloutCounts]) -> None:
    """Raise RuntimeError unless each rollout has the decode steps, drawn tokens and staleness that are counted."""
    for number, (counts, ages, known) in enumerate(zip(played.counts, played.staleness, expected, strict=True)):
        found, wanted = (*counts[:2], ages), (known.decode_steps, known.drawn, known.staleness)
        if found != wanted:
            raise RuntimeError(
                f"rollout {number}: decode steps, drawn tokens and staleness are {found}, and planning/tail.py counts "
                f"{wanted}: nothing is timed that is wrong"
            )


def fit_seconds(stretches: Sequence[tuple[float, Counts]]) -> tuple[float, float, float]:
    """Return the seconds of a decode step, of a token drawn in it, and of a token prefilled: least squares."""
    seconds, counts = (np.array(column, np.float64) for column in zip(*stretches, strict=True))
    a, b, c = np.linalg.lstsq(counts, seconds, rcond=None)[0].tolist()
    return a, b, c


def measure_tail(
    setting: RolloutSetting, rounds: int, deadline: float, prove: Callable[[Sequence[Written]], Any]
) -> list[dict[str, Any]]:
    """Measure a shape, at least one round, and no further one behind `deadline` (time.monotonic). Return a row for each
    of `FACTORS`. prove: raises if recorded log-probs are not the model's."""
    side, sides = TailSide(setting), (1, *FACTORS)
    side.play(FACTORS[0])  # warms up as well
    prove([Written(one.ids(), one.policy_positions(), one.policy_logprobs()) for one in side.last])
    runs: dict[int, list[Played]] = {factor: [] for factor in sides}
    expected = {factor: side.expected(factor) for factor in sides}
    for first in range(rounds):
        if first and time.monotonic() > deadline:
            break
        for place in range(len(sides)):
            factor = sides[(first + place) % len(sides)]
            gc.collect()
            played = side.play(factor)
            if setting.policy.device.type == "cpu":  # elsewhere a step is launched before the last is read
                check_counts(played, expected[factor])
            runs[factor].append(played)
    fitted = fit_seconds([one for played in runs.values() for each in played for one in each.stretches])
    return [_row(side, factor, runs, expected[factor], fitted) for factor in FACTORS]


def _row(
    side: TailSide,
    factor: int,
    runs: dict[int, list[Played]],
    expected: Sequence[tail.RolloutCounts],
    fitted: tuple[float, float, float],
) -> dict[str, Any]:
    shape = side.setting.shape
    rates = {each: [played.middle()[1][1] / played.middle()[0] for played in runs[each]] for each in (1, factor)}
    counts = {each: runs[each][-1].middle()[1] for each in (1, factor)}
    predicted = {each: counts[each][1] / float(np.dot(fitted, counts[each])) for each in (1, factor)}
    a, b, c = fitted
    total = sum(expected[AROUND:-AROUND], tail.RolloutCounts())
    again = sum(runs[factor][-1].again[AROUND:-AROUND])
    names = {"whole": 1, "partial": factor}

    def both(of: Callable[[int], Any]) -> dict[str, Any]:
        return {name: of(each) for name, each in names.items()}

    return {
        "bench": "rollout",
        **facts(),
        "shape": shape.name,
        "in_flight": factor * shape.questions,
        "slots": shape.samples,
        "lengths": shape.record() | {"mean": float(np.mean(side.lengths)), "sigma": tail.SIGMA},
        "steps": STEPS,
        "rounds": len(runs[factor]),
        "tokens_per_s": both(lambda each: spread(rates[each])),
        "ratio": spread([ours / whole for ours, whole in zip(rates[factor], rates[1], strict=True)]),
        "predicted_tokens_per_s": both(lambda each: predicted[each]),
        "predicted_ratio": predicted[factor] / predicted[1],
        "decode_steps": both(lambda each: counts[each][0]),
        "drawn": both(lambda each: counts[each][1]),
        "busy": both(lambda each: counts[each][1] / counts[each][0]),
        "prefilled": both(lambda each: counts[each][2]),
        "recomputed": again,
        "mean_staleness": total.mean_staleness,
        "step_s": a,
        "drawn_token_s": b,
        "prefilled_token_s": c,
        "fixed_share": a / (a + b * shape.samples),
    }


def show_tail(rows: Sequence[dict[str, Any]]) -> None:
    """Print a line for each row, and the parts of a step's time."""
    row = rows[0]
    table(
        f"rollout of unequal lengths, sampled tokens/s (medians) of {row['rounds']} runs of {row['steps']} rollouts; a "
        f"step takes {1e3 * row['step_s']:.2f} ms and {1e6 * row['drawn_token_s']:.0f} us a token",
        ("F / Q", "without", "partial", "ratio", "predicted", "busy of slots", "decode steps", "prefilled again"),
        [
            (
                f"{one['in_flight'] // one['lengths']['questions']}",
                *(f"{one['tokens_per_s'][name]['p50']:,.0f}" for name in ("whole", "partial")),
                spread_text(one["ratio"]),
                f"{one['predicted_ratio']:.2f}",
                f"{one['busy']['whole']:.1f} to {one['busy']['partial']:.1f} of {one['slots']}",
                f"{one['decode_steps']['whole']:,} to {one['decode_steps']['partial']:,}",
                f"{one['recomputed'] / one['drawn']['partial']:.0%} of drawn",
            )
            for one in rows
        ],
    )


