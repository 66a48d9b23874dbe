"""Supervised fine-tuning from a recipe to a model folder: sft.py trains; this file loads, saves and resumes.

    recipe -> transcripts or questions -> SftTrainer -> model folder with metrics.jsonl, sft.json and unused.jsonl

Until the complete model folder OUT appears, OUT.training is a run folder (engine/store/run_folder.py) with the newest
checkpoint: weights or adapters, moments, and digests of the transcripts and of the initial model. A killed run resumes
from it, on a CPU in float32 with the same bits as an uninterrupted run, because batches and learning rate are functions
of seed, restart and step. The steps of OUT.training are counted over all attempts.

Deliberately absent: printing, except when a run is resumed.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from thresher.common import signals
from thresher.common.errors import UserError
from thresher.common.files import atomic_write_text, delete_folder, need_room, staged_folder
from thresher.common.hashes import folder_digest, write_hashes
from thresher.common.records import write_records
from thresher.engine.assemble import RunContext, load_run_context
from thresher.engine.config.recipe import Recipe
from thresher.engine.config.sections import SftSection
from thresher.engine.optim.master_weights import MasterWeights
from thresher.engine.planning.memory import FP32, MOMENT_BYTES
from thresher.engine.store.checkpoint import (
    Checkpoint,
    SavablePolicy,
    check_newest,
    check_resumed,
    checkpoint_to_resume,
    load_optimizer,
    prune,
    save_checkpoint,
    start_record,
)
from thresher.engine.store.run_folder import RunFolder, sft_folder
from thresher.engine.training.sft import Begun, SftTrainer, read_data, read_transcripts
from thresher.engine.training.sft_data import Unused, write_unused
from thresher.engine.training.weights import whole_weights
from thresher.policy.lora import FOLDER, add_lora, load_adapters, save_adapters
from thresher.policy.model import Policy, load_policy

KEPT = 1  # checkpoints: a resumed run needs only the newest


@dataclass(frozen=True, slots=True)
class _Adapters:
    """A policy of which only the adapters are saved, because the rest is the recipe's model."""

    policy: Policy

    def save(self, path: Path, /) -> None:
        save_adapters(self.policy, path / FOLDER)

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return self.policy.named_parameters()


@dataclass(slots=True)
class FineTuning:
    """One run: `run` trains, and writes the model. unused: those of the `questions` questions that gave no
    transcript."""

    recipe: Recipe
    context: RunContext
    weights: MasterWeights
    sft: SftSection
    trainer: SftTrainer
    unused: list[Unused]
    questions: int

    @property
    def trained(self) -> int:
        """Return the number of trained parameters: all, or the adapters'."""
        return sum(parameter.numel() for parameter in self.weights.module.parameters() if parameter.requires_grad)

    @property
    def most_steps(self) -> int:
        """Return the largest number of steps of all attempts together."""
        return self.sft.steps * (1 + (self.sft.max_restarts if self.sft.stop_at_copy_accuracy is not None else 0))

    def _bytes_to_write(self, folder: Path) -> int:
        """Return the number of bytes to write in addition to those in the folder. They are the model, all in float32,
        and the checkpoints that exist at the same time, including the one being written."""
        model = FP32 * sum(parameter.numel() for parameter in self.weights.module.parameters())
        each = int((FP32 + MOMENT_BYTES[self.recipe.optim.optimizer_state_dtype]) * self.trained)
        there = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        return model + min(KEPT + 1, self.most_steps // self.sft.save_every) * each - there

    def run(
        self, out: Path, watch: Callable[[dict[str, Any]], None], resume: bool = False, from_step: int | None = None
    ) -> dict[str, Any]:
        """Train, and write the model folder `out`; return the content of sft.json. watch: called with each step's
        record; when a run is resumed, first with that of the step it resumes after. resume, from_step: as in
        `train`."""
        started = time.perf_counter()
        recipe, folder, explicit_step = self.recipe, sft_folder(out), from_step is not None
        digests = self._digests()
        checkpoint = checkpoint_to_resume(folder / "checkpoints", from_step, recipe.run.verify) if resume else None
        if resume:
            period = lambda stored: stored.need(SftSection).save_every  # noqa: E731
            check_resumed("sft", folder, checkpoint, self.most_steps, explicit_step, period)
            self._check_digests(checkpoint, digests)
        need_room(out, self._bytes_to_write(folder), "the model, with its checkpoints,")
        with (
            RunFolder.resume(folder, recipe, unverified=explicit_step)
            if resume
            else RunFolder.create(folder, recipe) as run
        ):
            if not explicit_step:
                check_newest(run, checkpoint)
            run.truncate_after(checkpoint.step if checkpoint else -1)
            run.append_start(start_record(run, checkpoint, recipe.model.device == "cuda", explicit_step))
            before = float(checkpoint.state["seconds"]) if checkpoint else 0.0

            def clock() -> float:
                return before + time.perf_counter() - started

            figures = self._train(run, checkpoint, watch, clock, digests)
            records = [_of_attempt(record, self.sft) for record in run.metrics()]
            self._save(out, records, figures)
            delete_folder(folder)
        return figures

    def _train(
        self,
        run: RunFolder,
        checkpoint: Checkpoint | None,
        watch: Callable[[dict[str, Any]], None],
        clock: Callable[[], float],
        digests: dict[str, str | None],
    ) -> dict[str, Any]:
        begun = None
        if checkpoint is not None:
            records = [_of_attempt(record, self.sft) for record in run.metrics()]
            begun = Begun(records, partial(self._restore, checkpoint.path))
            watch(records[-1])

        def log(record: dict[str, Any]) -> None:
            run.append_metrics(record | {"step": record["restart"] * self.sft.steps + record["step"]})
            watch(record)

        def keep(done: int, optimizer: torch.optim.Optimizer) -> None:
            due, stopped = done % self.sft.save_every == 0, signals.noted() is not None
            if due or stopped:
                state = {"seconds": clock(), "metrics": run.metrics_mark(), **digests}
                policy = self.weights.master
                kept: SavablePolicy = policy if self.recipe.lora is None else _Adapters(policy)
                save_checkpoint(run.checkpoints, done, kept, optimizer, state, interim=not due)
                prune(run.checkpoints, KEPT)
            if stopped:
                with signals.allow_signals():
                    pass

        with self.context.threads(), signals.defer_signals("a step that is being learned is finished, and saved"):
            result = self.trainer.run(log, begun, keep)
        return {
            "steps": result.steps,
            "restarts": result.restarts,
            "loss": result.loss,
            "names copied right": result.copying,
            "gate": self.sft.stop_at_copy_accuracy,
            "passed": result.passed,
            "parameters trained": self.trained,
            "questions unused": len(self.unused),
            "seconds": clock(),
        }

    def _restore(self, checkpoint: Path, optimizer: torch.optim.Optimizer) -> None:
        """Restore weights and moments of a checkpoint, bit for bit."""
        policy = self.weights.master
        if self.recipe.lora is not None:
            load_adapters(policy, checkpoint / FOLDER)
        else:  # verified when it was chosen
            saved = load_policy(checkpoint, policy.dtype, policy.device, verify=False)
            policy.load_state_dict(saved.state_dict())
            self.weights.refresh()
        load_optimizer(checkpoint, optimizer, policy.named_parameters())

    def _digests(self) -> dict[str, str | None]:
        """Return the digests that a resumed run must find unchanged. They are of the transcripts' tokens and, unless
        run.verify is off, of the initial model."""
        verified = self.recipe.run.verify
        model = folder_digest(self.recipe.model.path, "config.json", "*.safetensors") if verified else None
        return {"transcripts": self.trainer.data_digest, "model": model}

    def _check_digests(self, checkpoint: Checkpoint | None, digests: dict[str, str | None]) -> None:
        if checkpoint is None:
            return
        changed = [
            name
            for name, digest in digests.items()
            if None not in (digest, checkpoint.state.get(name)) and checkpoint.state[name] != digest
        ]
        if "transcripts" in changed:
            raise UserError(
                f"{self.sft.transcripts or self.sft.data}: its transcripts have other tokens than those that the run "
                "was trained on before its checkpoint; restore the file, its prompt and the tokenizer, or start again "
                "with another --out"
            )
        if changed:
            raise UserError(
                f"{self.recipe.model.path}: its weights are not those that the run began with; put them back, or "
                "start again with another --out"
            )

    def _save(self, out: Path, records: list[dict[str, Any]], figures: dict[str, Any]) -> None:
        """Write the model folder, with the measurements next to the weights."""
        with staged_folder(out) as staged:
            self.weights.master.save(staged)
            self.context.tokenizer.save(staged)
            write_records(staged / "metrics.jsonl", records)
            write_unused(self.unused, staged / "unused.jsonl")
            atomic_write_text(staged / "sft.json", json.dumps(figures, indent=2) + "\n")
            write_hashes(staged)


def check_out(out: Path, resume: bool) -> None:
    """Raise UserError if `FineTuning.run` would refuse its folder, before anything is loaded."""
    folder = sft_folder(out)
    if out.exists():
        if not resume:
            raise UserError(f"{out}: exists already; choose another folder for the model")
        left = f"; {folder} is no longer needed, delete it" if folder.exists() else ""
        raise UserError(f"{out}: the fine-tuning is finished; choose another --out to begin a new one{left}")
    if resume and not folder.exists():
        raise UserError(f"{out}: no fine-tuning was begun there; leave out --resume to begin one")
    if not resume and folder.exists():
        raise UserError(
            f"{folder}: a fine-tuning that is not finished; continue with --resume, or delete it to begin again"
        )
    if resume:
        RunFolder.existing(folder, "delete it, and begin again without --resume")


def load_fine_tuning(recipe: Recipe) -> FineTuning:
    """Load the model, adapters if the recipe has them, and transcripts from `sft.transcripts` or `sft.data`."""
    sft = recipe.need(SftSection)
    context = load_run_context(recipe)
    policy = context.policy
    encoding = (
        context.tokenizer,
        context.renderer,
        context.episode_config.template,
        next(iter(policy.config.eos_token_ids), None),
    )
    unused: list[Unused] = []
    questions = 0
    if sft.transcripts is not None:
        transcripts = read_transcripts(sft.transcripts, *encoding)
    else:
        transcripts, unused, questions = read_data(sft, *encoding)
    if recipe.lora is not None:
        add_lora(policy, **asdict(recipe.lora))
    weights = whole_weights(recipe, policy, Path(recipe.model.path))
    trainer = SftTrainer(weights, transcripts, sft, recipe.optim, context.vocab_size, recipe.run.seed)
    return FineTuning(recipe, context, weights, sft, trainer, unused, questions)


def _of_attempt(record: dict[str, Any], sft: SftSection) -> dict[str, Any]:
    """Return a record of the run folder with its step within its attempt."""
    return record | {"step": record["step"] - record["restart"] * sft.steps}
