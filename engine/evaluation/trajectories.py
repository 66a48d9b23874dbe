"""`thresher rollout`: generate trajectories for questions, without judges, rewards or measures.

    {"id", "group", "sample", "reason", "searches", "segments": [{"source", "text", "ids", "logprobs"}, ..],
     "question", "golden_answers", .., "seed", "temperature", "settings"}                        a line of the file

The seed of a sample is a function of (seed, question number, sample). An interrupted file can be resumed; on a CPU in
float32 it is then byte for byte equal to the file of an uninterrupted command.
"""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from thresher.common import console
from thresher.common.errors import UserError
from thresher.common.jsonl import Record
from thresher.common.locks import locked_file
from thresher.common.records import RecordLog
from thresher.engine.assemble import RunContext, load_run_context
from thresher.engine.config.recipe import Recipe
from thresher.engine.evaluation.evaluate import generate_in_batches
from thresher.engine.evaluation.run import check_prompts, recipe_settings, retriever_of
from thresher.engine.protocol.trajectory import Trajectory
from thresher.engine.rollout.rollout import Job, seed_of
from thresher.engine.scoring.score import asked_record, check_whole
from thresher.retrieval.questions import read_questions
from thresher.rewards.reward import Source


@dataclass(frozen=True, kw_only=True)
class RolloutPlan:
    """Settings in addition to the recipe. samples: number per question. resume: `out` may exist."""

    questions: str
    out: Path
    samples: int = 1
    temperature: float = 1.0
    limit: int | None = None
    resume: bool = False


def run_rollouts(recipe: Recipe, plan: RolloutPlan) -> None:
    """Write the trajectories that `plan.out` lacks, and show their figures. UserError while another process writes to
    `plan.out`."""
    check_out(plan.out, plan.resume)
    with locked_file(plan.out):
        _run_rollouts(recipe, plan)


def check_out(out: Path, resume: bool) -> None:
    """Raise UserError unless the file can be created or resumed."""
    if out.suffix != ".jsonl":
        raise UserError(f"{out}: expected a name that ends in .jsonl, since it grows line by line")
    if not out.parent.is_dir():
        raise UserError(f"{out}: the folder {out.parent} does not exist; make it first")
    if os.path.lexists(out) and not resume:
        raise UserError(f"{out}: exists already; choose another file, or continue this one with --resume")


def _run_rollouts(recipe: Recipe, plan: RolloutPlan) -> None:
    questions = read_questions(plan.questions, golds_needed=False)[: plan.limit]
    context = load_run_context(recipe.running_at_most(len(questions) * plan.samples))
    rollout = context.rollout(retriever_of(recipe, context.system))
    shown = rollout.retrieve_and_truncate(questions)
    prompts = check_prompts(shown, rollout, context, "rollout", "--set model.prompt=chat")
    jobs = [
        Job(question, group, sample, seed_of("rollout", recipe.run.seed, group, sample))
        for group, question in enumerate(shown.questions)
        for sample in range(plan.samples)
    ]
    log = RecordLog(plan.out, remedy="choose another file, or delete this one to begin again")
    settings = sha256(json.dumps(recipe_settings(recipe), sort_keys=True).encode()).hexdigest()[:16]
    done = _recover(log, jobs, prompts, plan.temperature, settings)
    totals: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    seconds = 0.0

    def keep(batch: Sequence[Job], trajectories: list[Trajectory]) -> None:
        nonlocal seconds
        more = {"temperature": plan.temperature, "settings": settings}
        log.append(*(record | more for record in _records(batch, trajectories, context)))
        reasons.update(trajectory.reason for trajectory in trajectories)
        clock = rollout.clock
        seconds += clock.total
        totals.update(sampled=clock.sampled_tokens, prefilled=clock.prefilled_tokens, searches=clock.search_queries)
        totals.update(tools=clock.tool_calls, errors=clock.tool_errors)

    try:
        with context.threads():
            generate_in_batches(rollout, jobs, plan.temperature, done, "rollout", keep)
        log.finish()
    except UserError as error:
        if not plan.out.exists():
            raise
        raise UserError(f"{error} ({plan.out} keeps all so far: the same command with --resume goes on)") from error
    figures = {
        "trajectories": len(jobs),
        **({"of them from before": done} if done else {}),
        "sampled tokens": totals["sampled"],
        "prefilled tokens": totals["prefilled"],
        "searches": totals["searches"],
        **({"calls of tools": totals["tools"], "of them errors": totals["errors"]} if totals["tools"] else {}),
        "seconds": seconds,
        "tokens/s": totals["sampled"] / seconds if seconds else None,
        "ended": ", ".join(f"{reason} {count:,}" for reason, count in sorted(reasons.items())) or None,
    }
    console.figures(f"rollout: {plan.out}", figures)


def _recover(
    log: RecordLog, jobs: Sequence[Job], prompts: Sequence[Sequence[int]], temperature: float, settings: str
) -> int:
    """Return the number of jobs in the file. UserError, naming the line, unless its records are the first of these
    jobs."""
    done = 0
    for number, record in log.recover():
        where = f"{log.path}:{number}"
        if done == len(jobs):
            raise UserError(
                f"{where}: only {done} trajectories were asked for; resume with the --n and --limit "
                "that the file was begun with, or choose another file"
            )
        _check_belongs(record, where, jobs[done], prompts, temperature)
        if record.get("settings") != settings:
            raise UserError(
                f"{where}: it was sampled with another model, system, index or limits; resume with the model and the "
                "recipe that the file was begun with, or choose another file"
            )
        done += 1
    return done


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


def _records(jobs: Sequence[Job], trajectories: Sequence[Trajectory], context: RunContext) -> list[Record]:
    records = []
    for job, trajectory in zip(jobs, trajectories, strict=True):
        check_whole(trajectory, context.tokenizer, context.system.tags, context.limits.max_context)
        record = trajectory.to_dict(context.tokenizer)
        written = [(record["segments"], trajectory)]
        written += [(record["branches"][name], branch) for name, branch in trajectory.branches.items()]
        for segments, one in written:
            for stored, segment in zip(segments, one.segments, strict=True):
                if segment.source is Source.POLICY:
                    stored["logprobs"] = segment.logprobs
        records.append(record | asked_record(job.question) | {"seed": job.seed})
    return records
