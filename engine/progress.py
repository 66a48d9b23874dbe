"""The progress line of a training run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from thresher.common.console import Line
from thresher.engine.config.recipe import Recipe
from thresher.engine.reports.health import findings, short_verdict
from thresher.engine.store.run_folder import RunFolder, chosen_by
from thresher.engine.training.train import Progress


def progress_to(line: Line, recipe: Recipe, out: str | Path) -> Callable[[Progress], None]:
    """Return the function that `train` reports to, which prints to `line`. out: the run's folder."""
    evals: list[dict[str, Any]] = []
    records: list[dict[str, Any]] = []
    verdict = ""

    def watch(progress: Progress) -> None:
        nonlocal verdict
        record = progress.record
        if not record:
            line.total = progress.steps
            line.from_before(progress.step)
            records.extend(RunFolder(Path(out), unverified=True).metrics())
            return
        if "eval" in record:
            evals.append(record)
        metric = chosen_by([*evals, {"eval": record}], recipe.run.best_metric)
        name = {"em": "EM", "f1": "F1"}.get(metric, metric)
        greedy = evals[-1]["eval"].get(metric) if evals else None
        if "eval" in record:
            if progress.step == 0 and greedy is not None:
                line.to(0, f"before: {name} {greedy:.3f} (greedy, {record['eval']['questions']} questions)")
            return
        sampled = record.get(metric)
        text = f"reward {record['reward']:.3f}"
        text += f"  {name} {sampled:.3f}" if sampled is not None and metric != "reward" else ""
        text += f"  greedy {greedy:.3f}" if greedy is not None else ""
        gap = "" if record["loss_tokens"] else "no update"
        if "logprob_gap_max" in record:
            gap = f"log-prob gap {record['logprob_gap_max']:.0e}"
        gap += f"  staleness {record['staleness_mean']:.1f}" if "staleness_mean" in record else ""
        records.append(record)
        # Not at every step of thousands: the more there are, the longer it takes.
        if progress.step % (1 + len(records) // 1000) == 0:
            found = findings(records, recipe.rollout.questions_per_step)
            verdict = f"  unhealthy: {short_verdict(found)}" if found else ""
        line.total = progress.steps
        line.to(progress.step, f"{text}  {gap}{verdict}")

    return watch
