"""`thresher rollout`: questions in, trajectories out. Nothing is judged, rewarded or measured.

A line a trajectory, sample after sample and question after question: what a run folder holds of one (`to_dict`), its
question and golds, with which `thresher score` rewards it, and of its sampling the seed, the temperature and each drawn
token's log-prob.

    {"id", "group", "sample", "reason", "searches", "segments": [{"source", "text", "ids", "logprobs"}, ..],
     "question", "golden_answers", .., "seed", "temperature"}

A sample's seed is a function of (seed, question number, sample). The file grows part by part, with checksums
(common/records.py), and what a kill leaves is gone on with: whole lines are kept where they are the first of what
was asked for, and half a line is dropped. On a CPU in float32 the file is then, byte for byte, that of a command which
nothing interrupted.

Deliberately absent: a record of the settings beside the file. Each line says what it answers and how it was drawn.
"""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from thresher.common import console
from thresher.common.errors import UserError
from thresher.common.jsonl import Record
from thresher.common.locks import locked_file
from thresher.common.records import RecordLog
from thresher.engine.assemble import RunContext, load_run_context
from thresher.engine.config.recipe import Recipe
from thresher.engine.evaluation.evaluate import draw_parts
from thresher.engine.evaluation.run import retriever_of
from thresher.engine.protocol.trajectory import Trajectory
from thresher.engine.rollout.rollout import Job, Rollout, seed_of
from thresher.engine.scoring.score import asked_record, check_whole
from thresher.retrieval.questions import read_questions
from thresher.rewards.reward import Source


@dataclass(frozen=True, kw_only=True)
class RolloutPlan:
    """Settings of the trajectories besides the recipe; samples: of each question; resume: `out` may be there."""

    questions: str
    out: Path
    samples: int = 1
    temperature: float = 1.0
    limit: int | None = None
    resume: bool = False


def run_rollouts(recipe: Recipe, plan: RolloutPlan) -> None:
    """Write what `plan.out` lacks of the trajectories, and show the figures. UserError while another process does."""
    check_out(plan.out, plan.resume)
    with locked_file(plan.out):
        _run_rollouts(recipe, plan)


def _run_rollouts(recipe: Recipe, plan: RolloutPlan) -> None:
    questions = read_questions(plan.questions, golds_needed=False)[: plan.limit]
    running = min(recipe.rollout.max_num_seqs, len(questions) * plan.samples)
    context = load_run_context(replace(recipe, rollout=replace(recipe.rollout, max_num_seqs=running)))
    retriever = retriever_of(recipe, context.system)
    rollout = context.rollout(retriever)
    shown = rollout.retrieve_and_truncate(questions)
    if warning := shown.warning():
        console.console.print(f"rollout: {warning}", soft_wrap=True)
    prompts = [rollout.prompt(question) for question in shown.questions]  # refused before anything is written
    if recipe.model.prompt == "raw" and context.tokenizer.chat_template is not None:
        console.console.print(
            "rollout: the prompt goes in as it is, though the model has a chat template, which "
            "--set model.prompt=chat takes",
            soft_wrap=True,
        )
    seed = recipe.run.seed
    jobs = [
        Job(question, group, sample, seed_of("rollout", seed, group, sample))
        for group, question in enumerate(shown.questions)
        for sample in range(plan.samples)
    ]
    log = RecordLog(plan.out, remedy="choose another file, or delete this one to begin again")
    kept = _kept(log, jobs, prompts, plan.temperature)
    try:
        with context.threads():
            figures = _draw(rollout, context, jobs, kept, plan, log)
        log.finish()
    except UserError as error:
        if not plan.out.exists():
            raise
        raise UserError(f"{error} ({plan.out} keeps all so far: the same command with --resume goes on)") from error
    console.figures(f"rollout: {plan.out}", figures)


def check_out(out: Path, resume: bool) -> None:
    """Raise UserError unless the file may be written, or gone on with."""
    if out.suffix != ".jsonl":
        raise UserError(f"{out}: expected a name that ends in .jsonl, since it grows line by line")
    if not out.parent.is_dir():
        raise UserError(f"{out}: the folder {out.parent} does not exist; make it first")
    if os.path.lexists(out) and not resume:
        raise UserError(f"{out}: exists already; choose another file, or go on with this one by --resume")


def _kept(log: RecordLog, jobs: Sequence[Job], prompts: Sequence[Sequence[int]], temperature: float) -> int:
    """Count the jobs that the file holds. UserError, naming the line, for a file that holds anything but the first of
    these jobs."""
    kept = 0
    for number, record in log.recover():
        where = f"{log.path}:{number}"
        if kept == len(jobs):
            raise UserError(
                f"{where}: only {kept} trajectories were asked for; resume with the --n and --limit "
                "that the file was begun with, or choose another file"
            )
        _check_belongs(record, where, jobs[kept], prompts, temperature)
        kept += 1
    return kept


def _check_belongs(record: Record, where: str, job: Job, prompts: Sequence[Sequence[int]], temperature: float) -> None:
    expected: dict[str, object] = {"id": job.question.id, "group": job.group, "sample": job.sample}
    expected |= {"seed": job.seed, "temperature": temperature}
    wrong = next((key for key, value in expected.items() if record.get(key) != value), None)
    if wrong is not None:
        raise UserError(
            f"{where}: its {wrong} is {json.dumps(record.get(wrong))}, not {json.dumps(expected[wrong])}; resume with "
            "the questions, --n, --seed and --temperature that the file was begun with, or choose another file"
        )
    segments = record.get("segments")
    prompt = segments[0] if isinstance(segments, list) and segments else None
    if not isinstance(prompt, dict) or prompt.get("ids") != prompts[job.group]:
        raise UserError(
            f"{where}: it begins with another prompt; resume with the model, system and recipe that the file was begun "
            "with, or choose another file"
        )


def _draw(
    rollout: Rollout, context: RunContext, jobs: Sequence[Job], kept: int, plan: RolloutPlan, log: RecordLog
) -> dict[str, Any]:
    """Draw the trajectories that are not in the file yet, and append them part by part; return figures of these
    alone."""
    reasons: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    seconds = 0.0

    def keep(part: Sequence[Job], trajectories: list[Trajectory]) -> None:
        nonlocal seconds
        log.append(*_records(part, trajectories, context, plan.temperature))
        reasons.update(trajectory.reason for trajectory in trajectories)
        clock = rollout.clock
        seconds += clock.total
        totals.update(sampled=clock.sampled_tokens, prefilled=clock.prefilled_tokens, searches=clock.search_queries)

    draw_parts(rollout, jobs, plan.temperature, kept, "rollout", keep)
    return {
        "trajectories": len(jobs),
        **({"of them from before": kept} if kept else {}),
        "sampled tokens": totals["sampled"],
        "prefilled tokens": totals["prefilled"],
        "searches": totals["searches"],
        "seconds": seconds,
        "tokens/s": totals["sampled"] / seconds if seconds else None,
        "ended": ", ".join(f"{reason} {count:,}" for reason, count in sorted(reasons.items())) or None,
    }


def _records(
    jobs: Sequence[Job], trajectories: Sequence[Trajectory], context: RunContext, temperature: float
) -> list[Record]:
    records = []
    for job, trajectory in zip(jobs, trajectories, strict=True):
        check_whole(trajectory, context.tokenizer, context.system.tags, context.limits.max_context)
        written = trajectory.to_dict(context.tokenizer)
        branches = [(written["branches"][name], branch) for name, branch in trajectory.branches.items()]
        for segments, one in ((written["segments"], trajectory), *branches):
            _add_logprobs(segments, one)
        records.append(written | asked_record(job.question) | {"seed": job.seed, "temperature": temperature})
    return records


def _add_logprobs(written: Sequence[Record], trajectory: Trajectory) -> None:
    for record, segment in zip(written, trajectory.segments, strict=True):
        if segment.source is Source.POLICY:
            record["logprobs"] = segment.logprobs
