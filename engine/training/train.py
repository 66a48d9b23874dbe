"""The training loop: steps (step.py), evaluations and checkpoints, written to a run folder.

No random state is carried from step to step, so a checkpoint is weights, moments and a step number, and a resumed run
has the same bits on a CPU. The reference is the policy that the run started from.

A signal (common/signals.py) ends a rollout, a judge's work or an evaluation at once; an update that has begun is
finished first. In both cases the last learned step is saved, the same on all ranks.
"""

import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from thresher.common import console
from thresher.common.errors import UserError
from thresher.common.files import Unwritable
from thresher.common.machine import KEEP_MEMORY, RETURN_MEMORY, cpu_memory, set_malloc
from thresher.common.signals import Interrupted, check, defer_signals
from thresher.engine.assemble import load_judges, load_questions, load_retrieval, load_run_context
from thresher.engine.config.recipe import Recipe, load_recipe
from thresher.engine.evaluation.evaluate import evaluate
from thresher.engine.evaluation.metrics import measured, summary_of
from thresher.engine.parallel.ranks import SINGLE, Ranks, trainers_of
from thresher.engine.parallel.sync import check_config_sync, file_digests, judges_of, open_run
from thresher.engine.planning.memory import check_disk
from thresher.engine.planning.plan import check_memory
from thresher.engine.protocol.trajectory import Trajectory
from thresher.engine.rollout.unfinished import RecordedDraws
from thresher.engine.scoring.score import Scored, check_all
from thresher.engine.store.checkpoint import (
    Checkpoint,
    Savable,
    check_newest,
    check_resumed,
    checkpoint_to_resume,
    prune,
    save_checkpoint,
    start_record,
)
from thresher.engine.store.run_folder import (
    RunFolder,
    evaluations_by_dev,
    expected_steps,
    step_name,
    tokens_spent,
    trajectories_of,
)
from thresher.engine.store.token_stats import TokenRecorder, stats_of, write_token_stats
from thresher.engine.trackers import check_trackers, tracking
from thresher.engine.training.asynchronous import AsyncGrpoStep
from thresher.engine.training.metrics import rank_step, run_summary, step_record
from thresher.engine.training.partial import SavedQueues, read_queue
from thresher.engine.training.step import DistributedGrpoStep, Diverged, GrpoStep, StepResult, divergence, weights_moved
from thresher.engine.training.update import explain_out_of_memory
from thresher.engine.training.weights import load_updater, starting_weights
from thresher.retrieval.questions import Question

HOLES = 1.2  # times a CPU's plan: the memory of a process that keeps freed memory, with holes between blocks


@dataclass(frozen=True, slots=True)
class Progress:
    """Report of the loop to `watch`: the metrics of a finished step, or an evaluation (`record["eval"]`). A resumed run
    first reports an empty record for the `step` that it resumes after. steps: expected number of steps."""

    step: int
    steps: int
    record: dict[str, Any]


def train(
    recipe: Recipe,
    out: str | Path,
    resume: bool = False,
    watch: Callable[[Progress], None] = lambda _: None,
    ranks: Ranks = SINGLE,
    from_step: int | None = None,
    allow_keys: Collection[str] = (),
    replay: str | Path | None = None,
) -> dict[str, Any]:
    """Run a recipe into the folder `out`; return the content of summary.json.

    resume: continue from the last checkpoint, or from that of `from_step` (0: the beginning). ranks: the processes that
    all call this; only rank 0 writes, watches and has a summary. allow_keys: which key may be sent where, as in
    `load_endpoint`. replay: folder of a run of this recipe; each token is sampled with the version of the weights that
    sampled it there, and results of tools are taken from it.
    """
    started = time.perf_counter()
    explicit_step = from_step is not None
    if recipe.run.async_ and not ranks.is_distributed:
        raise UserError(
            "run.async: expected false in one process, because its rollout and its update would take turns on one "
            "device; start two or more with torchrun, or set rollout.partial = true instead"
        )
    check_trackers(recipe.run.trackers)
    if replay is not None:
        recipe = replayed(recipe, replay)
    elif recipe.rollout.partial and recipe.rollout.tools_replay is not None:
        raise UserError(
            "rollout.tools_replay: expected none with rollout.partial = true, because the time that a call takes "
            "decides which weights draw the tokens after it; repeat the whole run with --replay RUN"
        )
    if ranks.is_main:
        RunFolder.check(out, resume)
    if resume:
        recipe = recipe.going_on(load_recipe(RunFolder(Path(out)).recipe_file))
    checkpoint = checkpoint_to_resume(Path(out) / "checkpoints", from_step, recipe.run.verify) if resume else None
    done = checkpoint.step if checkpoint else -1
    if done > recipe.run.steps:
        raise UserError(
            f"{out}: step {done} is done, and run.steps is {recipe.run.steps}; raise it, or go back with --resume-from"
        )
    check_config_sync(recipe, ranks, out, checkpoint.path if checkpoint else None)
    if ranks.is_main:
        if resume:
            planned = recipe.optim.schedule_steps
            also = f"; its learning rate is scheduled for {planned} steps, optim.schedule_steps" if planned else ""
            check_resumed("train", Path(out), checkpoint, recipe.run.steps, explicit_step=explicit_step, also=also)
        check_disk(recipe, recipe.model.path, out)
    train_ranks = trainers_of(ranks.count) if recipe.run.async_ else ranks.count
    resolved, plan = check_memory(recipe, starting_weights(recipe, checkpoint), train_ranks, ranks.on_machine)
    resolved = ranks.broadcast(lambda: resolved)  # otherwise a rank with less memory would compute differently
    if recipe.model.device == "cpu":  # kept memory saves a page fault for every 4 KiB of a step's activations
        fits = plan.total_bytes * HOLES <= cpu_memory()[0] // ranks.on_machine
        set_malloc(*(KEEP_MEMORY if fits else RETURN_MEMORY))
    # Rollout and updater share one policy, `context.policy`: the next rollout reads the weights that an update writes.
    # `resolved` has no "auto" left in [optim] and [grpo], which only the update reads.
    context = load_run_context(recipe, starting_weights(recipe, checkpoint))
    own = ranks.part(train_ranks) if recipe.run.async_ else ranks  # those with the same task as this one
    trains = ranks.rank < train_ranks
    updater = load_updater(resolved, context, checkpoint, own, trains)
    retriever = load_retrieval(recipe, context.system)
    files = file_digests(recipe)
    if checkpoint:
        _check_unchanged(checkpoint, retriever.identity if retriever else None, files)
    judges = load_judges(recipe, context.system, Path(out) / "replies.jsonl", allow_keys, rewarded_only=True)
    train_questions, dev_questions = load_questions(recipe, context.system)
    rollout = context.rollout(retriever)
    rollout.check_prompts(itertools.chain(train_questions, dev_questions))
    settings: dict[str, Any] = {
        "context": context,
        "questions": train_questions,
        "rollout": rollout,
        "judges": judges_of(judges, recipe, own),
        "updater": updater,
    }
    step: GrpoStep
    if recipe.run.async_:
        step = AsyncGrpoStep(**settings, ranks=own, everyone=ranks, trains=trains)
    else:
        step = DistributedGrpoStep(**settings, ranks=ranks) if ranks.is_distributed else GrpoStep(**settings)
    if replay is not None and recipe.rollout.partial:
        step.recorded = RecordedDraws(replay)
    with open_run(out, recipe, resume, ranks, unverified=explicit_step) as run, context.threads():
        if ranks.is_main and not explicit_step:
            check_newest(run, checkpoint)
        if checkpoint:
            if trains:
                updater.load_moments(checkpoint.path)
            if recipe.rollout.partial or recipe.run.async_:
                step.restore(*read_queue(checkpoint.path, ranks.rank, ranks.count))
        if ranks.is_main:
            run.truncate_after(done)
            run.append_start(start_record(run, checkpoint, recipe.model.device == "cuda", explicit_step))
        _announce(recipe, out, ranks)
        trainer = Trainer(step, dev_questions, run, files, ranks, own, samples=not (recipe.run.async_ and trains))
        seconds_before = float(checkpoint.state["seconds"]) if checkpoint else 0.0
        trackers = tracking(run.path, recipe.run.trackers if ranks.is_main else (), done)
        under_way = "a step that is being learned is finished, and saved"
        if recipe.rollout.stale_cache:
            under_way = "a step that is being learned is finished, and the run's last checkpoint kept"
        elif recipe.run.async_:
            under_way = "the step under way is finished, with the rollout that runs at the same time, and saved"
        finished = defer_signals(under_way, unless=trainer.loses_nothing)
        with trackers, finished, console.polling(lambda: updater.stage() or rollout.stage()):
            trainer.run(checkpoint, watch, seconds_before - started)
        if not ranks.is_main:
            return {}
        summary = run_summary(run.metrics(), recipe, seconds_before + time.perf_counter() - started)
        run.write_summary(summary)
    return summary


def replayed(recipe: Recipe, run: str | Path) -> Recipe:
    """Return the recipe with results of tools from `run`. UserError if that is a run of another recipe, or has not
    stored everything that was sampled."""
    if recipe.grpo.refill:
        raise UserError("--replay: expected grpo.refill = false, because groups set aside are not stored")
    if recipe.rollout.stale_cache or any(tool.noise for tool in (recipe.tools or {}).values()):
        key = "rollout.stale_cache = false" if recipe.rollout.stale_cache else "tools without noise"
        raise UserError(f"--replay: expected {key}, because what it decides is not stored")
    if recipe.run.async_:
        raise UserError("--replay: expected run.async = false, because the groups after the last step are not stored")
    if recipe.run.token_budget is not None:
        raise UserError(
            "--replay: expected no run.token_budget, because what a step prefills depends on when tools answer"
        )
    stored = load_recipe(RunFolder(Path(run)).recipe_file)
    if stored.run.keep_trajectories != 1:
        raise UserError(f"--replay {run}: expected run.keep_trajectories = 1, got {stored.run.keep_trajectories}")
    with_results = replace(stored.rollout, tools_replay=recipe.rollout.tools_replay)
    if found := recipe.differences(replace(stored, rollout=with_results)):
        raise UserError(f"--replay {run}: expected a run of the same recipe; here {'; '.join(found)}")
    return replace(recipe, rollout=replace(recipe.rollout, tools_replay=str(run))) if recipe.tools else recipe


class Trainer:
    """The loop of one run: steps, evaluations and checkpoints, into its folder.

    files: digests of the files that decide the run, which must be unchanged when it is resumed. own: the ranks with the
    same task as this one. samples: whether this rank evaluates; if not, it only trains (run.async).
    """

    def __init__(
        self,
        grpo_step: GrpoStep,
        dev_questions: Sequence[Question],
        run: RunFolder,
        files: Mapping[str, str],
        ranks: Ranks,
        own: Ranks,
        samples: bool,
    ) -> None:
        self.grpo_step, self.dev_questions, self.run_folder, self.ranks = grpo_step, dev_questions, run, ranks
        self.files, self.own, self.samples = files, own, samples
        self.context, self.rollout, self.updater = grpo_step.context, grpo_step.rollout, grpo_step.updater
        self.recipe = self.context.recipe
        self.warned_truncation = self.warned_no_signal = False
        self.best: list[Mapping[str, Any]] = []  # on rank 0, the record of the best evaluation so far
        self.spent = 0  # on rank 0, tokens as run.token_budget counts them

    def run(self, checkpoint: Checkpoint | None, watch: Callable[[Progress], None], offset: float) -> None:
        """Run the steps after the checkpoint, up to run.steps or run.token_budget. Seconds are counted from -`offset`
        on the clock of time.perf_counter."""
        done = checkpoint.step if checkpoint else 0
        records = self.run_folder.metrics() if self.ranks.is_main else []
        self.spent = tokens_spent(records)
        decay = self.recipe.optim.weight_decay
        self.grpo_step.weights_version, self.updater.moving = self.ranks.broadcast(
            lambda: weights_moved(records, decay)
        )
        last = self._is_last(done)
        learned = saved = done  # the steps of the current weights and of the last checkpoint
        begun = self.updater.begun
        if checkpoint:
            watch(self._progress(done, {}))
        try:
            # The run may have been killed during the evaluation that belongs to its checkpoint.
            if self.ranks.broadcast(
                lambda: self._recorded() != done and (done == 0 or self._evaluation_due(done, last))
            ):
                self._evaluate(done, watch)
            if self.ranks.broadcast(lambda: bool(checkpoint and checkpoint.interim and self._save_due(done, last))):
                self._save(done, offset)  # as a regular one
            step = done
            while not last:
                step += 1
                record = self.step(step)
                if record is not None:
                    self.run_folder.append_metrics(record)
                    self.spent += tokens_spent([record])
                    watch(self._progress(step, record))
                learned, begun, last = step, self.updater.begun, self._is_last(step)
                if self._evaluation_due(step, last):
                    self._evaluate(step, watch)
                if self.ranks.broadcast(partial(self._save_due, step, last)):
                    self._save(step, offset)
                    saved = step
        except (UserError, Interrupted) as error:
            # A step searches and calls its judges before it learns. Once this is saved, an unreachable server or a
            # signal costs only the sampling in progress. With several ranks a signal ends all of them here
            # (`Ranks.interruptible`); if one has failed, the others do not come here to save their shards.
            together = isinstance(error, Interrupted) or not self.ranks.is_distributed
            whole = self.updater.begun == begun and not isinstance(error, Diverged | Unwritable)
            # A resumed run begins with an empty cache; an uninterrupted one would have kept stale entries.
            if learned > saved and together and whole and not self.recipe.rollout.stale_cache:
                self._save(learned, offset, interim=True)
            raise

    def _progress(self, step: int, record: dict[str, Any]) -> Progress:
        return Progress(step, expected_steps(self.recipe.run, step, self.spent), record)

    def _is_last(self, step: int) -> bool:
        """Return whether no step follows this one, the same on all ranks."""
        steps, budget = self.recipe.run.steps, self.recipe.run.token_budget
        return step >= steps or (budget is not None and self.ranks.broadcast(lambda: self.spent >= budget))

    def _evaluation_due(self, step: int, last: bool) -> bool:
        return last or bool(self.recipe.run.eval_every and step % self.recipe.run.eval_every == 0)

    def _save_due(self, step: int, last: bool) -> bool:
        if last or step % self.recipe.run.save_every == 0:
            return True
        return self._evaluation_due(step, last) and self._best() == step

    def _best(self) -> int | None:
        """Return the step of the best evaluation so far. Its checkpoint is saved at once and outlives newer ones."""
        return self.best[0]["step"] if self.best else None

    def _recorded(self) -> int | None:
        """Read the best evaluation from the run folder; return the step of the last one."""
        evaluations = [record for record in self.run_folder.metrics() if "eval" in record]
        self.best = evaluations_by_dev(evaluations, self.recipe.run.best_metric)[:1]
        return max((record["step"] for record in evaluations), default=None)

    def _save(self, step: int, offset: float, interim: bool = False) -> None:
        savable, queues = self.updater.weights.whole(self.updater.optimizer), None
        if self.recipe.rollout.partial or self.recipe.run.async_:
            queues = self.ranks.gather(self.grpo_step.saved_queue.records())
        self.rollout.kept = None  # a run that is resumed here has no kept cache
        if savable is None:
            return
        retriever = self.rollout.retriever
        state = {
            "seconds": time.perf_counter() + offset,
            "index": retriever.identity if retriever else None,
            "files": dict(self.files),
            "metrics": self.run_folder.metrics_mark(),
        }
        folder = self.run_folder.checkpoints
        beside: list[Savable] = [self.context.tokenizer, *([] if queues is None else [SavedQueues(queues)])]
        save_checkpoint(folder, step, *savable, state, beside=beside, interim=interim)
        prune(folder, self.recipe.run.keep_checkpoints, spare=self._best())

    def loses_nothing(self) -> bool:
        """Return whether a signal may end the current work at once. Several ranks end it together, by
        `Ranks.interruptible`."""
        return self.grpo_step.collecting and not self.ranks.is_distributed

    def step(self, step: int) -> dict[str, Any] | None:
        """Run one step, from questions to new weights; store its trajectories if due. Return its metrics on rank 0,
        None elsewhere."""
        keep = self.recipe.run.keep_trajectories
        stored = bool(keep) and step % keep == 0
        recorder = TokenRecorder() if stored and self.recipe.run.token_stats_mib else None
        with explain_out_of_memory(self.updater, self.rollout):
            if not self.ranks.is_distributed:
                check()  # for a signal since the last step's rollout; several ranks end together
            self.rollout.tools.place, self.rollout.tools.step = trajectories_of(step), step
            result = self.grpo_step(step, recorder)
        if result is None:
            return None
        self._warn_of_cuts(result.sampled.shown.warning())
        if stored:
            self._store(result, recorder)
        of_ranks = self.own.gather(rank_step(result, self.context.system.tags))
        if of_ranks is None:
            return None
        record = step_record(step, of_ranks, self.recipe.grpo.refill) | result.beside
        self._warn_of_no_signal(record)
        return record

    def _store(self, result: StepResult, recorder: TokenRecorder | None) -> None:
        """Store a step's trajectories, and the values of their tokens in the update."""
        scored, tokenizer = zip(result.scored, result.advantages, strict=True), self.context.tokenizer
        lines = self._lines([{**entry.to_dict(tokenizer), "advantage": value} for entry, value in scored], self.own)
        path = None if lines is None else self.run_folder.write_trajectories(result.step, lines)
        if recorder is None:
            return
        trajectories = {(t.group, t.sample): t for t in (entry.trajectory for entry in result.scored)}

        def of_branches(trajectory: Trajectory, trained: bool) -> list[float]:
            branches = (branch for branch in trajectory.branches.values() if branch.in_loss is trained)
            return [value for branch in branches for value in branch.policy_logprobs()]

        sampled = {key: [*t.policy_logprobs(), *of_branches(t, trained=True)] for key, t in trajectories.items()}
        branches = {key: of_branches(t, trained=False) for key, t in trajectories.items()}
        gathered = self.own.gather(stats_of(sampled, branches, recorder))
        if path is not None and gathered is not None:
            stats = sorted(itertools.chain(*gathered), key=lambda entry: entry.key)
            write_token_stats(path.with_suffix(".safetensors"), stats, self.recipe.run.token_stats_mib * 2**20)

    def _lines(self, records: list[dict[str, Any]], ranks: Ranks) -> list[dict[str, Any]] | None:
        """Return the trajectory records of these ranks on rank 0, sorted by group and sample; None elsewhere."""
        gathered = ranks.gather(records)
        if gathered is None:
            return None
        return sorted(itertools.chain(*gathered), key=lambda record: (record["group"], record["sample"]))

    def _warn_of_cuts(self, warning: str | None) -> None:
        """Print the first warning that passages were cut to fit; the metrics count them all."""
        if warning and not self.warned_truncation:
            console.console.print(
                f"train: {warning} (reported once; cut_passages in metrics.jsonl keeps counting)", soft_wrap=True
            )
            self.warned_truncation = True

    def _warn_of_no_signal(self, record: Mapping[str, Any]) -> None:
        """Print a warning the first time that a refill finds no group with a signal."""
        none = record["zero_advantage_groups"] == self.recipe.rollout.questions_per_step
        if self.recipe.grpo.refill and none and not self.warned_no_signal:
            console.console.print(
                f"train: no group of step {record['step']} has a signal, so it updates nothing; rounds of sampling: "
                f"{record['refill_rounds']} (reported once; zero_advantage_groups in metrics.jsonl keeps counting)",
                soft_wrap=True,
            )
            self.warned_no_signal = True

    def _evaluate(self, step: int, watch: Callable[[Progress], None]) -> None:
        if not self.dev_questions:
            return
        started, context = time.perf_counter(), self.context
        with self.grpo_step.together():
            scored, cut_passages = self._evaluated(step) if self.samples else ([], 0)
        lines = self._lines([entry.to_dict(context.tokenizer) for entry in scored], self.ranks)
        gathered = self.ranks.gather((measured(scored, context.system.tags), cut_passages))
        if lines is None or gathered is None:
            return
        measures = summary_of([row for rows, _ in gathered for row in rows])
        measures |= {"cut_passages": sum(cut for _, cut in gathered), "seconds": time.perf_counter() - started}
        metric = self.recipe.run.best_metric
        if metric is not None and metric not in measures:
            known = ", ".join(name for name, value in measures.items() if isinstance(value, int | float))
            raise UserError(f"run.best_metric is {metric!r}, which no evaluation measures; expected one of {known}")
        self.run_folder.write_evaluation(step, lines)
        record = {"step": step, "eval": measures}
        self.run_folder.append_metrics(record)
        self.best = evaluations_by_dev([*self.best, record], self.recipe.run.best_metric)[:1]
        watch(self._progress(step, record))

    def _evaluated(self, step: int) -> tuple[list[Scored], int]:
        """Return this rank's share of an evaluation, and the number of its passages that were cut."""
        context, mine = self.context, self.own.share(len(self.dev_questions))
        asked = self.dev_questions[mine.start : mine.stop]
        with self.own.interruptible():
            shown = self.rollout.retrieve_and_truncate(asked)
        self._warn_of_cuts(shown.warning())
        with (
            explain_out_of_memory(self.updater, self.rollout),
            self.updater.weights.rolling_out(),
            console.stage("evaluation"),
        ):
            asked = shown.questions
            self.rollout.tools.place, self.rollout.tools.step = f"evaluations/{step_name(step)}", None
            with divergence(step):
                judges = self.grpo_step.judges
                scored = evaluate(self.rollout, asked, judges=judges, first=mine.start, ranks=self.own)
        check_all(scored, context.tokenizer, context.system.tags, context.limits.max_context)
        return scored, shown.cut_passages


def _announce(recipe: Recipe, out: str | Path, ranks: Ranks) -> None:
    """Print what is trained, once everything is loaded and the run's folder can be watched."""
    rollout, train_ranks = recipe.rollout, trainers_of(ranks.count)
    apart = f", of which {train_ranks} train and {ranks.count - train_ranks} sample" if recipe.run.async_ else ""
    console.announce(
        f"train: {recipe.run.steps} steps of {rollout.questions_per_step} questions x {rollout.group_size} samples"
        + (f" in {rollout.trees} trees, " if rollout.trees else ", ")
        + f"{recipe.grpo.kl_value} with beta {recipe.grpo.beta:g}, into {out}"
        + (f", on {ranks.count} ranks{apart}" if ranks.is_distributed else "")
        + f"; thresher watch {out} shows it as it goes"
    )


def _check_unchanged(checkpoint: Checkpoint, index: str | None, files: Mapping[str, str]) -> None:
    """Raise UserError if a server's index, or a file that decides the run, differs from that of the checkpoint."""
    before = checkpoint.state.get("index")
    if before is not None and before != index:
        raise UserError(
            f"retrieval.url: the server has another index ({index or 'unnamed'}) than the one that the run has "
            f"searched ({before}); start the server with that one"
        )
    for path, digest in checkpoint.state.get("files", {}).items():
        if files.get(path, digest) != digest:
            raise UserError(
                f"{path}: the file has changed since the run's last checkpoint was trained with it; put the old one "
                "back, or start a new run"
            )
