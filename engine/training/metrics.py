"""Records of a step in metrics.jsonl, and the summary at the end of a run."""

import itertools
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from thresher.engine.config.recipe import Recipe
from thresher.engine.evaluation.metrics import Measured, mean, measured, summary_of
from thresher.engine.protocol.trajectory import Trajectory, inherited_tokens, trained_contexts
from thresher.engine.store.run_folder import chosen_by, tokens_spent
from thresher.engine.training.importance import RecomputedLogprobs, gap_entries, recomputed_logprobs_record
from thresher.engine.training.step import StepResult, groups_with_signal
from thresher.engine.training.update import UpdateStats

_TIMES = ("decode", "prefill", "search", "host", "rest", "total")  # of a rollout's clock; the others are counts
_SLOTS = ("slots", "busy_slots")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """Measures of a step from one rank; `step_record` merges those of all ranks.

    right_logprobs: by (group, sample), the mean log-prob at sampling of the tokens of a trajectory with a right answer.
    rounds, replaced, tokens_replaced: as in `Sampled`. inherited: number of sampled tokens that trajectories took over
    from others. staleness: number of trained tokens by the number of updates between the weights that sampled them and
    those that are trained; empty without partial rollouts.
    """

    rows: list[Measured]
    cut_passages: int
    zero_advantage_groups: int
    updates: list[UpdateStats]
    scoring_seconds: float
    clock: dict[str, Any]
    rounds: int = 1
    replaced: int = 0
    tokens_replaced: int = 0
    inherited: int = 0
    staleness: dict[int, int] = field(default_factory=dict)
    recomputed: RecomputedLogprobs | None = None
    right_logprobs: dict[tuple[int, int], float] = field(default_factory=dict)


def rank_step(result: StepResult, tags: tuple[str, ...]) -> RankStep:
    """Return the measures of the calling rank."""
    sampled = result.sampled
    with_signal = groups_with_signal(result.scored, result.credit or result.advantages)
    right = {  # if no exact match is measured, the trajectories with a positive advantage
        (entry.trajectory.group, entry.trajectory.sample): logprobs
        for entry, advantage in zip(result.scored, result.advantages, strict=True)
        if entry.result.parts.get("em", advantage > 0) and (logprobs := entry.trajectory.policy_logprobs())
    }
    return RankStep(
        rows=measured(result.scored, tags),
        cut_passages=sampled.shown.cut_passages,
        zero_advantage_groups=len(sampled.scored.keys() - with_signal),
        updates=result.updates,
        recomputed=result.recomputed,
        scoring_seconds=result.scoring_seconds,
        clock=asdict(sampled.clock) | {"rest": sampled.clock.rest},
        rounds=sampled.rounds,
        replaced=sampled.replaced,
        tokens_replaced=sampled.tokens_replaced,
        inherited=sum(inherited_tokens(entry.trajectory) for entry in result.scored),
        staleness=staleness_of((entry.trajectory for entry in result.scored), result.step),
        right_logprobs={place: sum(logprobs) / len(logprobs) for place, logprobs in right.items()},
    )


def staleness_of(trajectories: Iterable[Trajectory], step: int) -> dict[int, int]:
    """Return the number of trained tokens by their staleness in this step."""
    found: Counter[int] = Counter()
    for trajectory in trajectories:
        for context in trained_contexts(trajectory):
            for version, count in context.versions:
                found[step - 1 - version] += count
    return dict(found)


def step_record(step: int, ranks: Sequence[RankStep], refill: bool = False) -> dict[str, Any]:
    """Return a step's line of metrics.jsonl. It has means over all ranks' trajectories, losses over tokens, sums of
    counts, and the seconds by phase of the slowest rank. refill: `grpo.refill` of the recipe."""
    updates = [_of_all(each) for each in zip(*(rank.updates for rank in ranks), strict=True)]
    recomputed = [rank.recomputed for rank in ranks if rank.recomputed is not None]
    right = sorted(itertools.chain.from_iterable(rank.right_logprobs.items() for rank in ranks))
    return {
        "step": step,
        **summary_of(sorted((row for rank in ranks for row in rank.rows), key=lambda row: row.place)),
        "right_logprob": mean([value for _, value in right]),
        "cut_passages": sum(rank.cut_passages for rank in ranks),
        "zero_advantage_groups": sum(rank.zero_advantage_groups for rank in ranks),
        **(_refill_metrics(ranks) if refill else {}),
        **_tree_metrics(ranks),
        **_staleness_metrics(ranks),
        **_update_metrics(updates),
        **_epoch_metrics(updates),
        **(recomputed_logprobs_record(recomputed) if recomputed else {}),
        "reward_seconds": max(rank.scoring_seconds for rank in ranks),
        "threads": torch.get_num_threads(),
        # How these threads wait: a policy, or a number of busy turns; None: the default of their library.
        "wait_policy": os.environ.get("OMP_WAIT_POLICY") or os.environ.get("GOMP_SPINCOUNT"),
        **_rollout_metrics([rank.clock for rank in ranks]),
    }


def run_summary(records: Sequence[dict[str, Any]], recipe: Recipe, seconds: float) -> dict[str, Any]:
    """Return the first and last evaluation, and the throughput over all steps, from the run's metrics."""
    evals = [record["eval"] for record in records if "eval" in record]
    steps = [record for record in records if "eval" not in record]

    def rate(tokens: str, time_key: str) -> float | None:
        spent = sum(record[time_key] for record in steps)
        return sum(record[tokens] for record in steps) / spent if spent else None

    first, last = (evals[0], evals[-1]) if evals else ({}, {})
    metric = chosen_by(records, recipe.run.best_metric)
    chosen = (
        {} if metric in ("em", "f1") else {f"{metric}_before": first.get(metric), f"{metric}_after": last.get(metric)}
    )
    return {
        **chosen,
        "em_before": first.get("em"),
        "em_after": last.get("em"),
        "f1_before": first.get("f1"),
        "f1_after": last.get("f1"),
        "questions": last.get("questions", 0),
        "seconds": seconds,
        "rollout_tokens_per_s": rate("sampled_tokens", "rollout_seconds"),
        "train_tokens_per_s": rate("train_tokens", "update_seconds"),
        "seed": recipe.run.seed,
        "steps": steps[-1]["step"] if steps else 0,
        "tokens_spent": tokens_spent(steps),
    }


def _refill_metrics(ranks: Sequence[RankStep]) -> dict[str, int]:
    """Return the number of rounds of a step, including the first, and of the groups and tokens set aside in them."""
    return {
        "refill_rounds": max(rank.rounds for rank in ranks),
        "refilled_groups": sum(rank.replaced for rank in ranks),
        "tokens_set_aside": sum(rank.tokens_replaced for rank in ranks),
    }


def _tree_metrics(ranks: Sequence[RankStep]) -> dict[str, float]:
    """Return the tokens sampled per trajectory, and the share of inherited tokens; {} if no trajectory is forked."""
    if not any(rank.clock["forks"] or rank.inherited for rank in ranks):
        return {}
    inherited, rows = sum(rank.inherited for rank in ranks), [row for rank in ranks for row in rank.rows]
    tokens = sum(row.measures["response_tokens"] or 0.0 for row in rows)
    return {"leaf_tokens": (tokens - inherited) / len(rows), "inherited_share": inherited / max(tokens, 1)}


def _staleness_metrics(ranks: Sequence[RankStep]) -> dict[str, Any]:
    """Return the mean staleness of the trained tokens, and their number by staleness from 0 on; {} if none is known."""
    total = sum((Counter(rank.staleness) for rank in ranks), Counter[int]())
    if not total:
        return {}
    counts = [total[staleness] for staleness in range(max(total) + 1)]
    mean_staleness = sum(staleness * count for staleness, count in enumerate(counts)) / total.total()
    return {"staleness_mean": mean_staleness, "staleness_tokens": counts}


def _update_metrics(updates: Sequence[UpdateStats]) -> dict[str, Any]:
    if not updates:
        return {"train_tokens": 0, "computed_tokens": 0, "loss_tokens": 0, "update_seconds": 0.0}
    first, total = updates[0], UpdateStats()
    for stats in updates:
        total.add(stats)
    return {
        "loss": total.loss / len(updates),
        "grad_norm": max(stats.grad_norm for stats in updates),
        "lr": updates[-1].lr,
        **{name: value / total.rows for name, value in total.sums.items()},
        **total.largest,
        # Of the first update: later ones start from other weights. Tokens sampled with other weights have no gap.
        **_gap_entries([first]),
        "capped": total.capped,
        "train_tokens": total.tokens,
        "computed_tokens": total.computed_tokens,
        "loss_tokens": total.rows,
        "update_seconds": sum(stats.seconds for stats in updates),
    }


def _epoch_metrics(updates: Sequence[UpdateStats]) -> dict[str, Any]:
    """Return how far the policy has moved from the old log-probs in each pass; {} if there is a single pass."""
    epochs = sorted({stats.epoch for stats in updates})
    if epochs[-1:] <= [0]:
        return {}
    by_epoch = []
    for epoch in epochs:
        own = [stats for stats in updates if stats.epoch == epoch]
        rows = sum(stats.rows for stats in own)
        means = {name: sum(stats.sums[name] for stats in own) / rows for name in ("ratio", "clipped")}
        by_epoch.append(means | _gap_entries(own))
    return {"by_epoch": by_epoch}


def _gap_entries(updates: Sequence[UpdateStats]) -> dict[str, float]:
    total = sum(stats.sums.get("logprob_gap", 0.0) for stats in updates)
    largest = max(stats.largest.get("logprob_gap_max", 0.0) for stats in updates)
    return gap_entries(sum(stats.fresh for stats in updates), total, largest)


def _of_all(ranks: Sequence[UpdateStats]) -> UpdateStats:
    """Return the statistics of one optimiser step, from those of each rank."""
    first, seconds = ranks[0], max(stats.seconds for stats in ranks)
    total = UpdateStats(grad_norm=first.grad_norm, lr=first.lr, epoch=first.epoch, seconds=seconds)
    for stats in ranks:
        total.add(stats)
    return total


def _rollout_metrics(clocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the seconds of the rank with the longest rollout, and the summed counts of all ranks."""
    slowest, slots = max(clocks, key=lambda each: each["total"]), sum(each["slots"] for each in clocks)
    return {
        "rollout_seconds": slowest["total"],
        "search_share": slowest["search"] / slowest["total"],  # of the rollout, while decoding waited
        "forward_host_seconds": slowest["host"] / max(slowest["forwards"], 1),  # the decoder's Python, per forward
        "host_seconds": slowest["rest"],
        **{f"{name}_seconds": slowest[name] for name in ("decode", "prefill", "search")},
        # Share of busy slots, over the decode steps in which any was busy; null if all groups were complete in the
        # queue.
        "slots_busy": sum(each["busy_slots"] for each in clocks) / slots if slots else None,
        **{name: sum(each[name] for each in clocks) for name in slowest if name not in _TIMES + _SLOTS},
    }
