"""The training loop: steps (step.py) into a run folder, with evaluations and checkpoints between them.

Nothing random is carried from step to step, so a checkpoint is weights, moments and a step number, and a resumed run
goes on with the same bits on a CPU. The policy that the run started from is its reference.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from thresher.engine import console
from thresher.engine.assemble import Parts, load_judges, load_parts, load_questions, load_retrieval
from thresher.engine.config.recipe import Recipe
from thresher.engine.config.sections import SystemSection
from thresher.engine.evaluation.evaluate import evaluate
from thresher.engine.evaluation.metrics import measured, summary_of
from thresher.engine.parallel.agreement import check_ranks
from thresher.engine.parallel.first import judges_of, open_run
from thresher.engine.parallel.ranks import ALONE, Ranks
from thresher.engine.planning.check import check_memory
from thresher.engine.protocol.passages import Fitted, show_passages
from thresher.engine.rollout.rollout import Rollout
from thresher.engine.scoring.score import Judges
from thresher.engine.store.best_checkpoint import steps_by_dev
from thresher.engine.store.checkpoint import prune, save_checkpoint
from thresher.engine.store.resume import checkpoint_to_resume
from thresher.engine.store.run_folder import RunFolder, read_metrics
from thresher.engine.training.master_weights import starting_weights
from thresher.engine.training.memory import out_of_memory, return_freed_memory
from thresher.engine.training.metrics import part_of_step, run_summary, step_record
from thresher.engine.training.sharded_update import load_updater
from thresher.engine.training.step import Diverged, GrpoStep, check_trajectories
from thresher.engine.training.update import Updater
from thresher.retrieval.questions import Question
from thresher.rewards.errors import UserError

HELD_TO_PLAN = 2**28  # bytes of a plan, from which on a CPU gives freed memory back


@dataclass(frozen=True, slots=True)
class Progress:
    """What the loop reports to its watcher: a finished step's metrics, or an evaluation (`record["eval"]`)."""

    step: int
    steps: int
    record: dict[str, Any]


def train(
    recipe: Recipe,
    out: str | Path,
    resume: bool = False,
    watch: Callable[[Progress], None] = lambda _: None,
    ranks: Ranks = ALONE,
    from_step: int | None = None,
) -> dict[str, Any]:
    """Run a recipe into the folder `out`; returns what summary.json holds. `resume` goes on from its last checkpoint,
    or from that of `from_step`; 0 is the beginning. ranks: the processes that all call this, of which rank 0 alone
    writes, watches and has a summary."""
    started = time.perf_counter()
    if ranks.first:
        RunFolder.check(out, resume)
    checkpoint = checkpoint_to_resume(Path(out) / "checkpoints", from_step, recipe.run.verify) if resume else None
    check_ranks(recipe, ranks, out, checkpoint.path if checkpoint else None)
    decided, planned = check_memory(recipe, starting_weights(recipe, checkpoint), ranks.count, ranks.on_machine)
    decided = ranks.from_first(lambda: decided)  # a rank with less memory would otherwise compute in another way
    if recipe.model.device == "cpu" and planned.total_bytes >= HELD_TO_PLAN:
        return_freed_memory()
    parts = load_parts(recipe, starting_weights(recipe, checkpoint))
    updater = load_updater(decided, parts, checkpoint, ranks)
    retriever = load_retrieval(recipe, parts.system)
    if checkpoint:
        _check_index(checkpoint.state.get("index"), retriever.identity if retriever else None)
        _check_system(checkpoint.state.get("system"), parts)
    judges = judges_of(load_judges(recipe, parts.system, Path(out) / "replies.jsonl", rewarded_only=True), ranks)
    train_questions, dev_questions = load_questions(recipe, parts.system)
    rollout = parts.rollout(retriever)
    rollout.check_prompts(itertools.chain(train_questions, dev_questions))
    with open_run(out, recipe, resume, ranks) as run, parts.threads():
        if checkpoint:
            run.check_metrics(checkpoint.step, checkpoint.state.get("metrics"))
        run.truncate_after(checkpoint.step if checkpoint else -1)
        trainer = Trainer(parts, updater, rollout, judges, train_questions, dev_questions, run, ranks)
        if checkpoint:
            updater.load_moments(checkpoint.path)
        before = float(checkpoint.state["seconds"]) if checkpoint else 0.0
        trainer.run(checkpoint.step if checkpoint else 0, watch, before - started)
        if not ranks.first:
            return {}
        records = read_metrics(run.metrics_file)
        summary = run_summary(records, recipe, before + time.perf_counter() - started)
        run.write_summary(summary)
    return summary


class Trainer:
    """One run: its parts, its questions and its folder."""

    def __init__(
        self,
        parts: Parts,
        updater: Updater,
        rollout: Rollout,
        judges: Judges,
        train_questions: Sequence[Question],
        dev_questions: Sequence[Question],
        run: RunFolder,
        ranks: Ranks = ALONE,
    ) -> None:
        self.ranks = ranks
        self.parts, self.recipe, self.rollout, self.run_folder = parts, parts.recipe, rollout, run
        self.updater, self.judges = updater, judges
        self.warned_truncation = False
        self.dev_questions = dev_questions
        self.grpo_step = GrpoStep(
            parts=parts,
            questions=train_questions,
            rollout=rollout,
            judges=judges,
            updater=updater,
            ranks=ranks,
        )

    def run(self, done: int, watch: Callable[[Progress], None], offset: float) -> None:
        """Steps `done` + 1 to run.steps. Seconds are counted from -`offset` on the clock of time.perf_counter."""
        settings = self.recipe.run
        learned = saved = done  # the step whose weights these are, and that of the last checkpoint
        try:
            if self.ranks.from_first(lambda: done == 0 or self._evaluation_missing(done)):
                self._evaluate(done, watch)
            for step in range(done + 1, settings.steps + 1):
                record = self.step(step)
                learned = step
                if record is not None:
                    self.run_folder.append_metrics(record)
                    watch(Progress(step, settings.steps, record))
                if self._evaluation_due(step):
                    self._evaluate(step, watch)
                if self.ranks.from_first(partial(self._save_due, step)):
                    self._save(step, offset)
                    saved = step
        except UserError as error:
            # A step searches and asks its judges before it learns: once this is saved, what a server that stays away
            # costs is the sampling that was under way. Of several ranks the others would not be there to save theirs.
            if learned > saved and not isinstance(error, Diverged) and not self.ranks.several:
                self._save(learned, offset)
            raise

    def _evaluation_due(self, step: int) -> bool:
        settings = self.recipe.run
        return step == settings.steps or bool(settings.eval_every and step % settings.eval_every == 0)

    def _save_due(self, step: int) -> bool:
        settings = self.recipe.run
        if step == settings.steps or step % settings.save_every == 0:
            return True
        return self._evaluation_due(step) and self._best() == step

    def _best(self) -> int | None:
        """The step whose evaluation was best so far: its checkpoint is saved at once and outlives newer ones."""
        ranked = steps_by_dev(read_metrics(self.run_folder.metrics_file))
        return ranked[0][0] if ranked else None

    def _evaluation_missing(self, step: int) -> bool:
        """Whether the run was cut off in the evaluation that belongs to the checkpoint of this step."""
        records = read_metrics(self.run_folder.metrics_file)
        return self._evaluation_due(step) and not any("eval" in r and r["step"] == step for r in records)

    def _save(self, step: int, offset: float) -> None:
        savable = self.updater.savable()
        if savable is None:
            return
        retriever = self.rollout.retriever
        state = {
            "seconds": time.perf_counter() + offset,
            "index": retriever.identity if retriever else None,
            "system": self.parts.system_digest,
            "metrics": self.run_folder.metrics_mark(),
        }
        save_checkpoint(
            self.run_folder.checkpoints,
            step,
            *savable,
            state,
            tokenizer=self.parts.tokenizer,
        )
        prune(self.run_folder.checkpoints, self.recipe.run.keep_checkpoints, spare=self._best())

    def step(self, step: int) -> dict[str, Any] | None:
        """One step, from questions to new weights; its trajectories are stored where due. Returns its metrics, on rank
        0."""
        try:
            result = self.grpo_step(step)
        except torch.OutOfMemoryError:
            raise out_of_memory(self.updater, self.rollout) from None
        self._warn_of_cuts(result.shown)
        keep = self.recipe.run.keep_trajectories
        if keep and step % keep == 0:
            scored = zip(result.scored, result.advantages, strict=True)
            tokenizer = self.parts.tokenizer
            lines = self._lines([{**entry.to_dict(tokenizer), "advantage": value} for entry, value in scored])
            if lines is not None:
                self.run_folder.write_trajectories(step, lines)
        parts = self.ranks.gather(part_of_step(result, self.rollout, self.parts.system.tags))
        return None if parts is None else step_record(step, parts)

    def _lines(self, records: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """All ranks' records of trajectories by group and sample, on rank 0; None elsewhere."""
        gathered = self.ranks.gather(records)
        if gathered is None:
            return None
        return sorted(itertools.chain(*gathered), key=lambda record: (record["group"], record["sample"]))

    def _warn_of_cuts(self, shown: Fitted) -> None:
        """The first time that passages were cut to fit; the metrics count them all."""
        if (warning := shown.warning()) and not self.warned_truncation:
            console.console.print(
                f"train: {warning} (reported once; cut_passages in metrics.jsonl goes on counting)", soft_wrap=True
            )
            self.warned_truncation = True

    def _evaluate(self, step: int, watch: Callable[[Progress], None]) -> None:
        if not self.dev_questions:
            return
        started = time.perf_counter()
        parts = self.parts
        mine = self.ranks.part(len(self.dev_questions))
        asked = self.dev_questions[mine.start : mine.stop]
        shown = show_passages(asked, parts.system, parts.tools, parts.renderer, self.rollout.retriever)
        self._warn_of_cuts(shown)
        with self.updater.rolling_out():
            scored = evaluate(self.rollout, shown.questions, judges=self.judges, first=mine.start)
        check_trajectories(scored, parts, step)
        lines = self._lines([entry.to_dict(parts.tokenizer) for entry in scored])
        gathered = self.ranks.gather((measured(scored, parts.system.tags), shown.cut_passages))
        if lines is None or gathered is None:
            return
        measures = summary_of([row for rows, _ in gathered for row in rows])
        measures |= {"cut_passages": sum(cut for _, cut in gathered), "seconds": time.perf_counter() - started}
        self.run_folder.write_evaluation(step, lines)
        record = {"step": step, "eval": measures}
        self.run_folder.append_metrics(record)
        watch(Progress(step, self.recipe.run.steps, record))


def _check_index(before: str | None, now: str | None) -> None:
    """UserError where a server says that it has another index than the run searched until its checkpoint."""
    if before is not None and before != now:
        raise UserError(
            f"retrieval.url: the server has another index ({now or 'unnamed'}) than the one that the run has searched "
            f"({before}); start it with that one"
        )


def _check_system(before: str | None, parts: Parts) -> None:
    """UserError where the user's own system file is another than the one that the run had until its checkpoint."""
    if before is not None and before != parts.system_digest:
        raise UserError(
            f"{parts.recipe.need(SystemSection).name}: the file has changed since the run's last checkpoint was "
            "trained with it; put the old one back, or start a new run"
        )
