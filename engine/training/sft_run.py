"""Supervised fine-tuning from a recipe to a model folder; sft.py trains, here its parts are put together and kept.

    recipe -> transcripts or questions -> SftTrainer -> model folder with metrics.jsonl, sft.json and unused.jsonl

Deliberately absent: printing, and a resume; a run is short, and leaves its folder whole or not at all.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thresher.engine.assemble import Parts, load_parts
from thresher.engine.config.recipe import Recipe
from thresher.engine.config.sections import SftSection
from thresher.engine.training.sft import SftTrainer, read_data, read_transcripts
from thresher.engine.training.sft_data import Unused, write_unused
from thresher.engine.training.weights import put_adapters
from thresher.policy.files import atomic_write_text, staged_folder
from thresher.policy.hashes import write_hashes
from thresher.policy.model import Policy
from thresher.retrieval.data.jsonl import write_jsonl


@dataclass(slots=True)
class FineTuning:
    """One run: `train`, then `save`. `unused` are those of `questions` questions that gave no transcript."""

    parts: Parts
    policy: Policy
    sft: SftSection
    trainer: SftTrainer
    unused: list[Unused]
    questions: int
    records: list[dict[str, Any]] = field(default_factory=list)

    @property
    def trained(self) -> int:
        """Parameters that learn: all, or the adapters'."""
        return sum(parameter.numel() for parameter in self.policy.parameters() if parameter.requires_grad)

    @property
    def saved_bytes(self) -> int:
        """Of what `save` writes: all in float32, adapters merged and by themselves."""
        return 4 * sum(parameter.numel() for parameter in self.policy.parameters())

    def train(self, watch: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Train, with a call of `watch` for each step's record; the figures of sft.json."""
        started = time.perf_counter()

        def log(record: dict[str, Any]) -> None:
            self.records.append(record)
            watch(record)

        with self.parts.threads():
            result = self.trainer.run(log)
        return {
            "steps": result.steps,
            "restarts": result.restarts,
            "loss": result.loss,
            "names copied right": result.copying,
            "gate": self.sft.gate,
            "passed": result.passed,
            "parameters trained": self.trained,
            "questions unused": len(self.unused),
            "seconds": time.perf_counter() - started,
        }

    def save(self, out: Path, figures: dict[str, Any]) -> None:
        """Write the model folder, with what was measured beside the weights."""
        with staged_folder(out) as staged:
            self.policy.save(staged)
            self.parts.tokenizer.save(staged)
            write_jsonl(staged / "metrics.jsonl", self.records)
            write_unused(self.unused, staged / "unused.jsonl")
            atomic_write_text(staged / "sft.json", json.dumps(figures, indent=2) + "\n")
            write_hashes(staged)


def load_fine_tuning(recipe: Recipe) -> FineTuning:
    """Model, adapters where the recipe wants them, and transcripts from `sft.transcripts` or `sft.data`."""
    sft = recipe.need(SftSection)
    parts = load_parts(recipe)
    policy = parts.policy
    encoding = parts.tokenizer, parts.renderer, parts.tools.template, next(iter(policy.config.eos_token_ids), None)
    unused: list[Unused] = []
    questions = 0
    if sft.transcripts is not None:
        transcripts = read_transcripts(sft.transcripts, *encoding)
    else:
        transcripts, unused, questions = read_data(sft, *encoding)
    if recipe.lora is None:
        policy = policy.float()
    else:
        put_adapters(recipe, policy)
    trainer = SftTrainer(policy, transcripts, sft, recipe.optim, parts.vocab_size, recipe.run.seed)
    return FineTuning(parts, policy, sft, trainer, unused, questions)
