"""`thresher bench rollout --shape tail`: rollouts with unequal sample lengths, with and without rollout.partial.

Partial rollouts are also measured with rollout.stale_cache. Lengths are the quantiles of a lognormal distribution in a
random order (planning/tail.py: `tail_lengths`, `lengths_of_run`). They are forced: a sample's question names its
length, and random weights do not stop. The weights stay the same, but each rollout starts with an empty cache, as after
an update, so that unfinished samples are prefilled again; with rollout.stale_cache it starts with the last rollout's
cache. Without rollout.partial Q groups are in flight, so that a rollout lasts as long as its longest sample; with it F.
The sides are timed in turn. Figures leave out the first and the last `AROUND` rollouts, which fill and empty the slots.

On a CPU, every side without a stale cache is first played with `Limits.reuse` off. Then no sample waits for a prompt
that another computes, and samples start in the order of their numbers; each rollout's decode steps and drawn tokens,
and the staleness of the tokens that it trains on, must equal those of `count_rollouts`. The timed runs share prompts.
There a sample may take the slot of a waiting one, so that decode steps differ from the count; a row has both.

    seconds = a x decode steps + b x tokens drawn + c x tokens prefilled

a, b and c are least squares over the decode steps of all timed runs, of CPU seconds on a CPU. The predicted ratio is
computed from the counts of the timed runs.
"""

import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

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

FACTORS = (2, 3, 5)  # F / Q
STEPS = 12  # rollouts of a run that count for the figures
SPARE = 128  # cache tokens per slot beyond a sample's, so that free memory never delays a sample
AROUND = max(FACTORS)  # rollouts before those, and as many after

Floats = npt.NDArray[np.float64]


class Way(NamedTuple):
    """The settings of a side. factor: F / Q; 1: without rollout.partial."""

    factor: int
    stale_cache: bool = False


WHOLE = Way(1)


@dataclass(slots=True)
class Played:
    """A side's run. Rows are [seconds, decode steps, tokens drawn, tokens prefilled], of each rollout and of stretches
    of decode steps. recomputed: tokens prefilled again, by rollout. staleness: by rollout, the number of trained tokens
    with each staleness."""

    rollouts: list[Floats] = field(default_factory=list)
    stretches: list[Floats] = field(default_factory=list)
    recomputed: list[int] = field(default_factory=list)
    staleness: list[Counter[int]] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    def middle(self) -> Floats:
        """Return the sum of the rows of the rollouts that count for the figures."""
        total: Floats = np.sum(self.rollouts[AROUND:-AROUND], axis=0)
        return total


class TailSide(RolloutSide):
    """The engine's rollouts around an episode of one turn with the length of its sample. The one turn of the shape has
    the maximum length."""

    def __init__(self, setting: RolloutSetting, reuse: bool = True) -> None:
        shape = setting.shape
        super().__init__(setting, reuse=reuse, kv_tokens=shape.samples * (shape.longest + SPARE))
        (longest,) = shape.turns
        self.steps = STEPS + 2 * AROUND
        samples = self.steps * shape.samples
        self.lengths = tail.lengths_of_run(
            tail.tail_lengths(tail.MEAN_SHARE * longest, longest, samples=samples), samples
        )
        self.last: list[Trajectory] = []  # of the last rollout
        self.now = time.process_time if setting.policy.device.type == "cpu" else time.perf_counter

    def count(self, factor: int) -> list[tail.RolloutCounts]:
        """Return the counts of each rollout with `factor` times a step's groups in flight."""
        shape = self.setting.shape
        queue = tail.Queue(shape.group, shape.questions, factor * shape.questions, shape.samples)
        return tail.count_rollouts(self.lengths, queue)

    def play(self, way: Way) -> Played:
        """Play a run."""
        played, queue = Played(), Queue()
        self.rollout.kept = None
        for step in range(self.steps):
            marks: list[Floats] = []
            started = time.process_time()
            if way == WHOLE:
                self._play_whole(step, marks)
            else:
                self._play_partial(step, way, queue, marks)
            played.cpu_seconds.append(time.process_time() - started)
            played.rollouts.append(self._row(self.rollout.clock.total))
            played.stretches += [later - earlier for earlier, later in pairwise(marks)]
            played.recomputed.append(self.rollout.clock.tokens_recomputed)
            played.staleness.append(self._staleness(step))
        return played

    def _play_whole(self, step: int, marks: list[Floats]) -> None:
        count = self.setting.shape.questions
        jobs = [job for group in range(step * count, (step + 1) * count) for job in self._jobs(group)]
        self.last = self.rollout.run(jobs, 1.0, lambda ended: marks.append(self._row(self.now())))

    def _play_partial(self, step: int, way: Way, queue: Queue, marks: list[Floats]) -> None:
        """Play the queue until the groups of this step are complete, as GrpoStep does."""
        count = self.setting.shape.questions
        taking = Taking(queue, count, min(way.factor * count, self.steps * count - queue.next), count)

        def more(complete: list[Group]) -> list[Group] | None:
            marks.append(self._row(self.now()))
            if taking.over():
                return None
            version = step if way.stale_cache else 0  # so that no prompt is shared with groups of older weights
            new = {group: Group(self._jobs(group), version=version) for group in taking.due()}
            queue.groups |= new
            return list(new.values())

        unfinished = [group for group in queue.groups.values() if group.trajectories is None]
        play_on(self.rollout, unfinished, 1.0, step, more, keep=way.stale_cache)
        taken, _ = taking.take()
        self.last = [one for group in taken.values() for one in group.trajectories or ()]

    def _jobs(self, group: int) -> list[Job]:
        size, texts = self.setting.shape.group, self.setting.questions
        text, first = texts[group % len(texts)], group * size
        return [Job(Question(f"q{first + n}", text, ()), group, n, seed=first + n) for n in range(size)]

    def _episode(self, question: Question, config: EpisodeConfig) -> Episode:
        yield Prompt(config.template, question.question, [])
        yield Generate((STOP,), self._length(question.id))
        return "ended"

    def _length(self, question: str) -> int:
        return self.lengths[int(question.removeprefix("q"))]

    def _row(self, seconds: float) -> Floats:
        clock = self.rollout.clock
        steps = clock.slots // self.setting.shape.samples
        return np.array([seconds, steps, clock.busy_slots, clock.prefilled_tokens], np.float64)

    def _staleness(self, step: int) -> Counter[int]:
        """Return the number of tokens of the last rollout's trajectories with each staleness. RuntimeError for a sample
        of another length than requested."""
        found = Counter[int]()
        for one in self.last:
            (turn,) = turns(one)
            if len(turn.ids) != (asked := self._length(one.question_id)):
                raise RuntimeError(f"expected a sample of {asked} tokens, got {len(turn.ids)} ({one.reason})")
            for version, tokens in turn.versions or [(step, asked)]:
                found[step - version] += tokens
        return found


def check_counts(played: Played, expected: Sequence[tail.RolloutCounts]) -> None:
    """Raise RuntimeError unless each rollout has the counted decode steps, drawn tokens and staleness."""
    for step, (row, ages, known) in enumerate(zip(played.rollouts, played.staleness, expected, strict=True)):
        found, counted = (int(row[1]), int(row[2]), ages), (known.decode_steps, known.drawn, known.staleness)
        if found != counted:
            raise RuntimeError(
                f"rollout {step}: decode steps, drawn tokens and their staleness are {found}, but planning/tail.py "
                f"counts {counted}; wrong results are not timed"
            )


def fit_seconds(rows: Sequence[Floats]) -> Floats:
    """Return the seconds of a decode step, of a token drawn and of a token prefilled: least squares over `rows`."""
    table_R4 = np.stack(rows)
    found: Floats = np.linalg.lstsq(table_R4[:, 1:], table_R4[:, 0], rcond=None)[0].astype(np.float64)
    return found


def measure_tail(
    setting: RolloutSetting,
    rounds: int,
    deadline: float,
    prove: Callable[[Sequence[Written]], Any],
    keep: Callable[..., None],
) -> list[dict[str, Any]]:
    """Measure a shape; return two rows for each of `FACTORS`, without and with a stale cache.

    rounds: at most, and at least one; none starts after `deadline` (time.monotonic). prove: raises an error if recorded
    log-probs are not the model's. keep: gets the rows of each round but the last, which those of later rounds replace.
    """
    partial = [Way(factor, stale) for stale in (False, True) for factor in FACTORS]
    if setting.policy.device.type == "cpu":  # on a GPU, a step is launched before the last one is read
        alone = TailSide(setting, reuse=False)
        for factor in (WHOLE.factor, *FACTORS):
            check_counts(alone.play(Way(factor)), alone.count(factor))
    sides = [WHOLE, *partial]
    side, runs = TailSide(setting), dict[Way, list[Played]]((way, []) for way in sides)
    for first in range(rounds):
        if first:
            if time.monotonic() > deadline:
                break
            keep(*_rows(side, partial, runs))
        for place in range(len(sides)):
            way = sides[(first + place) % len(sides)]
            gc.collect()
            runs[way].append(side.play(way))
            if not first:
                prove([Written(one.ids(), one.policy_positions(), one.policy_logprobs()) for one in side.last])
    return _rows(side, partial, runs)


def _rows(side: TailSide, partial: Sequence[Way], runs: dict[Way, list[Played]]) -> list[dict[str, Any]]:
    fitted = fit_seconds([row for played in runs.values() for one in played for row in one.stretches])
    return [_row(side, way, runs, fitted) for way in partial]


def _row(side: TailSide, way: Way, runs: dict[Way, list[Played]], fitted: Floats) -> dict[str, Any]:
    shape, pairs = side.setting.shape, list(zip(runs[way], runs[WHOLE], strict=True))
    partial, whole = (float(counts[1] / (fitted @ counts)) for counts in (one.middle()[1:] for one in pairs[-1]))
    step_s, drawn_s, prefilled_s = fitted.tolist()
    return {
        "bench": "rollout",
        **facts(),
        "device": side.setting.policy.device.type,
        "shape": shape.name,
        "in_flight": way.factor * shape.questions,
        "stale_cache": way.stale_cache,
        "slots": shape.samples,
        "lengths": shape.record() | {"mean": float(np.mean(side.lengths)), "sigma": tail.SIGMA},
        "steps": STEPS,
        "rounds": len(pairs),
        "ratio": spread([_rate(one) / _rate(other) for one, other in pairs]),
        "cpu_ratio": spread([_rate(one, cpu=True) / _rate(other, cpu=True) for one, other in pairs]),
        "predicted_ratio": partial / whole,
        "step_s": step_s,
        "drawn_token_s": drawn_s,
        "prefilled_token_s": prefilled_s,
        "step_share": step_s / (step_s + drawn_s * shape.samples),  # share of a full step's time
        "whole": _figures(runs[WHOLE], side.count(WHOLE.factor)),
        "partial": _figures(runs[way], side.count(way.factor)),
    }


def _rate(played: Played, cpu: bool = False) -> float:
    """Return the tokens drawn per second of wall or CPU time."""
    seconds, _, drawn, _ = played.middle()
    return float(drawn / (sum(played.cpu_seconds[AROUND:-AROUND]) if cpu else seconds))


def _figures(runs: Sequence[Played], expected: Sequence[tail.RolloutCounts]) -> dict[str, Any]:
    """Return a side's figures for a row; the counts are the same in each of its runs."""
    counted = sum(expected[AROUND:-AROUND], tail.RolloutCounts())
    steps, drawn, prefilled = (int(value) for value in runs[-1].middle()[1:])
    return {
        "tokens_per_s": spread([_rate(played) for played in runs]),
        "cpu_tokens_per_s": spread([_rate(played, cpu=True) for played in runs]),
        "decode_steps": steps,
        "counted_steps": counted.decode_steps,
        "drawn": drawn,
        "busy": drawn / steps,
        "prefilled": prefilled,
        "recomputed": sum(runs[-1].recomputed[AROUND:-AROUND]),
        "staleness": counted.mean_staleness,
    }


def show_tail(rows: Sequence[dict[str, Any]]) -> None:
    """Print a line for each row, and the parts of a step's time."""
    table(
        "rollouts of unequal lengths, sampled tokens/s (medians), without and with rollout.partial",
        ("model, F / Q", "cache", "tokens/s", "ratio", "by CPU s", "predicted", "busy slots", "decode steps", "again"),
        [
            (
                f"{row['lengths']['layers']} x {row['lengths']['hidden']}, "
                f"{row['in_flight'] // row['lengths']['questions']}",
                "stale" if row["stale_cache"] else "new",
                _change(row, lambda side: f"{side['tokens_per_s']['p50']:,.0f}"),
                spread_text(row["ratio"]),
                spread_text(row["cpu_ratio"]),
                f"{row['predicted_ratio']:.2f}",
                _change(row, lambda side: f"{side['busy']:.1f}") + f" of {row['slots']}",
                _change(row, lambda side: f"{side['decode_steps']:,}"),
                f"{row['partial']['recomputed'] / row['partial']['drawn']:.0%}",
            )
            for row in rows
        ],
    )


def _change(row: dict[str, Any], of: Callable[[dict[str, Any]], str]) -> str:
    return f"{of(row['whole'])}, {of(row['partial'])}"
