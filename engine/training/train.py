"""The training loop: questions -> rollout -> rewards -> advantages -> update, step after step, into a run folder.

    for step in 1 .. steps:
        questions of the step        a function of (seed, step)
        G samples of each            noise a function of (seed, step, question, sample)
        rewards, group advantages    systems/, rewards/advantages.py
        update(s)                    grpo.py; in float32 the rollout's weights are these very tensors
        metrics, trajectories, and every so often an evaluation and a checkpoint

Nothing random is carried from step to step, so a checkpoint is weights, moments and a step number, and a resumed run
goes on with the same bits on a CPU. The policy that the run started from is its reference.
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

from thresher.engine import console
from thresher.engine.assemble import Parts, load_judges, load_parts, load_questions, load_retrieval
from thresher.engine.config.recipe import Recipe, SystemSection
from thresher.engine.evaluation.evaluate import evaluate, summarise
from thresher.engine.protocol.passages import Fitted, fit_passages, with_passages
from thresher.engine.rollout.rollout import Rollout
from thresher.engine.rollout.samples import Job
from thresher.engine.scoring.score import Judges, Scored, check_all, score
from thresher.engine.store.best_checkpoint import steps_by_dev
from thresher.engine.store.checkpoint import latest_checkpoint, load_optimizer, prune, save_checkpoint
from thresher.engine.store.run_folder import RunFolder, read_metrics
from thresher.engine.training.master_weights import starting_weights, trained_and_reference
from thresher.engine.training.update import Updater, UpdateStats, advantages, make_items
from thresher.policy.model import Policy
from thresher.retrieval.questions import Question
from thresher.rewards.errors import UserError


@dataclass(frozen=True, slots=True)
class Progress:
    """What the loop tells whoever watches it: a finished step's metrics, or an evaluation (`record["eval"]`)."""

    step: int
    steps: int
    record: dict[str, Any]


def seed_of(*parts: object) -> int:
    """63 bits that depend on all parts, the same on every machine."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


def questions_of_step(questions: Sequence[Question], count: int, seed: int, step: int) -> list[Question]:
    """The step's questions: each pass over the data is shuffled by (seed, pass) and every question comes once in it."""
    chosen = []
    for at in range((step - 1) * count, step * count):
        number, position = divmod(at, len(questions))
        chosen.append(questions[_order(len(questions), seed, number)[position]])
    return chosen


def train(
    recipe: Recipe, out: str | Path, resume: bool = False, watch: Callable[[Progress], None] = lambda _: None
) -> dict[str, Any]:
    """Run a recipe into the folder `out`; returns what summary.json holds. `resume` goes on from its last
    checkpoint."""
    started = time.perf_counter()
    RunFolder.check(out, resume)
    checkpoint = latest_checkpoint(Path(out) / "checkpoints") if resume else None
    parts = load_parts(recipe, starting_weights(recipe, checkpoint))
    master, reference = trained_and_reference(recipe, parts.policy, checkpoint)
    index = load_retrieval(recipe, parts.system)
    if checkpoint:
        _check_index(checkpoint.state.get("index"), index.identity if index else None)
        _check_system(checkpoint.state.get("system"), parts)
    judges = load_judges(recipe, parts.system, Path(out) / "replies.jsonl", rewarded_only=True)
    train_questions, dev_questions = load_questions(recipe, parts.system)
    rollout = parts.rollout(index)
    rollout.check_prompts(itertools.chain(train_questions, dev_questions))
    with RunFolder.resume(out, recipe) if resume else RunFolder.create(out, recipe) as run:
        run.truncate_after(checkpoint.step if checkpoint else -1)
        trainer = Trainer(parts, master, reference, rollout, judges, train_questions, dev_questions, run)
        if checkpoint:
            load_optimizer(checkpoint.path, trainer.updater.optimizer, master.named_parameters())
        before = float(checkpoint.state["seconds"]) if checkpoint else 0.0
        trainer.run(checkpoint.step if checkpoint else 0, watch, before - started)
        summary = trainer.summary(before + time.perf_counter() - started)
        run.write_summary(summary)
    return summary


class Trainer:
    """One run: its parts, its questions and its folder."""

    def __init__(
        self,
        parts: Parts,
        master: Policy,
        reference: Policy | None,
        rollout: Rollout,
        judges: Judges,
        train_questions: Sequence[Question],
        dev_questions: Sequence[Question],
        run: RunFolder,
    ) -> None:
        self.parts, self.recipe, self.rollout, self.run_folder = parts, parts.recipe, rollout, run
        self.judges = judges
        self.cut_told = False
        self.train_questions, self.dev_questions = train_questions, dev_questions
        self.updater = Updater(
            parts.policy,
            master,
            reference,
            self.recipe.optim,
            self.recipe.grpo,
            parts.vocab_size,
            self.recipe.run.steps,
        )

    def run(self, done: int, watch: Callable[[Progress], None], offset: float) -> None:
        """Steps `done` + 1 to run.steps. Seconds are counted from -`offset` on the clock of time.perf_counter."""
        settings = self.recipe.run
        learned = saved = done  # the step whose weights these are, and that of the last checkpoint
        try:
            if done == 0 or self._evaluation_missing(done):
                self._evaluate(done, watch)
            for step in range(done + 1, settings.steps + 1):
                record = self.step(step)
                learned = step
                self.run_folder.append_metrics(record)
                watch(Progress(step, settings.steps, record))
                if self._evaluation_due(step):
                    self._evaluate(step, watch)
                if (
                    step == settings.steps
                    or step % settings.save_every == 0
                    or (self._evaluation_due(step) and self._best() == step)
                ):
                    self._save(step, offset)
                    saved = step
        except UserError as error:
            # A step searches and asks its judges before it learns: once this is saved, what a server that stays away
            # costs is the sampling that was under way.
            if learned > saved and not isinstance(error, Diverged):
                self._save(learned, offset)
            raise

    def _evaluation_due(self, step: int) -> bool:
        settings = self.recipe.run
        return step == settings.steps or bool(settings.eval_every and step % settings.eval_every == 0)

    def _best(self) -> int | None:
        """The step whose evaluation was best so far: its checkpoint is saved at once and outlives newer ones."""
        ranked = steps_by_dev(read_metrics(self.run_folder.metrics_file))
        return ranked[0][0] if ranked else None

    def _evaluation_missing(self, step: int) -> bool:
        """Whether the run was cut off in the evaluation that belongs to the checkpoint of this step."""
        records = read_metrics(self.run_folder.metrics_file)
        return self._evaluation_due(step) and not any("eval" in r and r["step"] == step for r in records)

    def _save(self, step: int, offset: float) -> None:
        index = self.rollout.index
        state = {
            "seconds": time.perf_counter() + offset,
            "index": index.identity if index else None,
            "system": self.parts.system_digest,
        }
        save_checkpoint(
            self.run_folder.checkpoints,
            step,
            self.updater.master,
            self.updater.optimizer,
            state,
            tokenizer=self.parts.tokenizer,
        )
        prune(self.run_folder.checkpoints, self.recipe.run.keep_checkpoints, spare=self._best())

    def step(self, step: int) -> dict[str, Any]:
        """One step, from questions to new weights; its metrics."""
        recipe = self.recipe
        questions = questions_of_step(self.train_questions, recipe.rollout.questions_per_step, recipe.run.seed, step)
        shown = self._shown(questions)
        jobs = [
            Job(question, group, sample, seed_of(recipe.run.seed, step, group, sample))
            for group, question in enumerate(shown.questions)
            for sample in range(recipe.rollout.group_size)
        ]
        trajectories = self.rollout.run(jobs, recipe.rollout.temperature)
        started = time.perf_counter()
        asked = [job.question for job in jobs]
        judged = score(asked, trajectories, self.parts.system, self.parts.tokenizer, self.judges)
        self._check(judged, step)
        rewards = self._rewards(judged, step)
        advantage = advantages(rewards, [job.group for job in jobs], recipe.grpo)
        reward_seconds = time.perf_counter() - started
        updates = self._update(judged, advantage, step)
        if recipe.run.keep_trajectories and step % recipe.run.keep_trajectories == 0:
            self.run_folder.write_trajectories(
                step,
                (
                    {**entry.to_dict(self.parts.tokenizer), "advantage": value}
                    for entry, value in zip(judged, advantage, strict=True)
                ),
            )
        with_signal = {job.group for job, value in zip(jobs, advantage, strict=True) if value}
        return {
            "step": step,
            **summarise(judged, self.parts.system.tags),
            "cut_passages": shown.cut_passages,
            "zero_advantage_groups": len(questions) - len(with_signal),
            **_update_metrics(updates),
            "reward_seconds": reward_seconds,
            **_rollout_metrics(self.rollout),
        }

    def _shown(self, questions: Sequence[Question]) -> Fitted:
        """What the prompts need: the passages to show, where the system does not search for itself, as far as they fit.
        The first cut is told; all are counted in the metrics."""
        parts = self.parts
        if parts.system.given_passages:
            questions = with_passages(questions, self.rollout.index, parts.renderer.k)
        fitted = fit_passages(questions, parts.system, parts.tools, parts.renderer)
        if (told := fitted.warning()) and not self.cut_told:
            console.console.print(
                f"train: {told} (told once; cut_passages in metrics.jsonl goes on counting)", soft_wrap=True
            )
            self.cut_told = True
        return fitted

    def _update(self, judged: Sequence[Scored], advantage: Sequence[float], step: int) -> list[UpdateStats]:
        """One optimiser step per part of the batch; a part holds whole groups."""
        recipe = self.recipe
        parts = recipe.grpo.updates_per_batch
        size = recipe.rollout.group_size
        bounds = [round(part * recipe.rollout.questions_per_step / parts) * size for part in range(parts + 1)]
        result = []
        for start, end in itertools.pairwise(bounds):
            trajectories = [entry.trajectory for entry in judged[start:end]]
            items = make_items(trajectories, advantage[start:end], recipe.grpo)
            if not items:
                continue  # every group of this part was without a signal, and the recipe drops those
            stats = self.updater.update(items, step - 1, recipe.rollout.temperature)
            if not math.isfinite(stats.grad_norm):
                raise _diverged(step, "gradient")
            result.append(stats)
        return result

    def _rewards(self, judged: Sequence[Scored], step: int) -> list[float]:
        rewards = [entry.result.reward for entry in judged]
        if self.recipe.grpo.shuffle_rewards:
            size = self.recipe.rollout.group_size
            rng = Random(seed_of("shuffle", self.recipe.run.seed, step))
            for start in range(0, len(rewards), size):
                group = rewards[start : start + size]
                rng.shuffle(group)
                rewards[start : start + size] = group
        return rewards

    def _check(self, judged: Sequence[Scored], step: int) -> None:
        if not all(math.isfinite(value) for entry in judged for value in entry.trajectory.policy_logprobs()):
            raise _diverged(step, "policy")
        parts = self.parts
        check_all(judged, parts.tokenizer, parts.system.tags, parts.limits.max_context)

    def _evaluate(self, step: int, watch: Callable[[Progress], None]) -> None:
        if not self.dev_questions:
            return
        started = time.perf_counter()
        shown = self._shown(self.dev_questions)
        judged = evaluate(self.rollout, shown.questions, judges=self.judges)
        self._check(judged, step)
        measures = summarise(judged, self.parts.system.tags)
        measures |= {"cut_passages": shown.cut_passages, "seconds": time.perf_counter() - started}
        self.run_folder.write_evaluation(step, (entry.to_dict(self.parts.tokenizer) for entry in judged))
        record = {"step": step, "eval": measures}
        self.run_folder.append_metrics(record)
        watch(Progress(step, self.recipe.run.steps, record))

    def summary(self, seconds: float) -> dict[str, Any]:
        """First and last evaluation, and the throughput over all steps, from the run's own metrics."""
        records = read_metrics(self.run_folder.metrics_file)
        evals = [record["eval"] for record in records if "eval" in record]
        steps = [record for record in records if "eval" not in record]

        def rate(tokens: str, time_key: str) -> float | None:
            spent = sum(record[time_key] for record in steps)
            return sum(record[tokens] for record in steps) / spent if spent else None

        first, last = (evals[0], evals[-1]) if evals else ({}, {})
        return {
            "em_before": first.get("em"),
            "em_after": last.get("em"),
            "f1_before": first.get("f1"),
            "f1_after": last.get("f1"),
            "questions": last.get("questions", 0),
            "seconds": seconds,
            "rollout_tokens_per_s": rate("sampled_tokens", "rollout_seconds"),
            "train_tokens_per_s": rate("train_tokens", "update_seconds"),
            "seed": self.recipe.run.seed,
            "steps": self.recipe.run.steps,
        }


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


class Diverged(UserError):
    """Training left the numbers that a float can hold: a result of the recipe, which a study may want to report."""


def _diverged(step: int, what: str) -> Diverged:
    return Diverged(
        f"step {step}: the {what} is not finite; start again with a lower optim.lr, a larger grpo.std_floor, or "
        'grpo.kl_value = "k2"'
    )


@lru_cache(maxsize=4)
def _order(count: int, seed: int, number: int) -> list[int]:
    order = list(range(count))
    Random(seed_of("questions", seed, number)).shuffle(order)
    return order


def _update_metrics(updates: Sequence[UpdateStats]) -> dict[str, Any]:
    if not updates:
        return {"train_tokens": 0, "loss_tokens": 0, "update_seconds": 0.0}
    rows = sum(stats.rows for stats in updates)
    sums: dict[str, float] = {}
    largest: dict[str, float] = {}
    for stats in updates:
        for name, value in stats.sums.items():
            sums[name] = sums.get(name, 0.0) + value
        for name, value in stats.largest.items():
            largest[name] = max(largest.get(name, 0.0), value)
    return {
        "loss": sum(stats.loss for stats in updates) / len(updates),
        "grad_norm": max(stats.grad_norm for stats in updates),
        "lr": updates[-1].lr,
        **{name: value / rows for name, value in sums.items()},
        **largest,
        "logprob_gap_max": updates[0].largest["logprob_gap_max"],  # later updates start from other weights
        "capped": sum(stats.capped for stats in updates),
        "train_tokens": sum(stats.tokens for stats in updates),
        "loss_tokens": rows,
        "update_seconds": sum(stats.seconds for stats in updates),
    }


def _rollout_metrics(rollout: Rollout) -> dict[str, Any]:
    clock = asdict(rollout.clock)
    return {
        "rollout_seconds": clock["total"],
        "search_share": clock["search"] / clock.pop("total"),  # of the rollout's time, in which decoding waited
        **{f"{name}_seconds": clock.pop(name) for name in ("decode", "prefill", "search", "host")},
        **clock,
    }
