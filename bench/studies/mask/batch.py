"""What `thresher study mask` looks at: a policy, and trajectories with their advantages.

Two sources. `stored` takes the last checkpoint and the last stored trajectories of a run: the real thing. `scripted`
needs nothing: transcripts of the demo's invented world, a model of the demo's shape with random weights, and every
second trajectory called right. Its rows, times and memory are those of a real step of that size; its log-probs and
gradients are those of a model that knows nothing yet.

Deliberately absent: the log-probs that were recorded when the trajectories were sampled (a run folder does not keep
them). Every treatment of the study recomputes its own, so that all ratios are 1.
"""

import math
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from thresher.common.errors import UserError
from thresher.common.jsonl import iter_jsonl
from thresher.common.records import read_records
from thresher.engine.config.recipe import Recipe, load_recipe
from thresher.engine.config.sections import GrpoSection, RetrievalSection
from thresher.engine.episode import Prompt, read_template
from thresher.engine.packing import advantages
from thresher.engine.protocol.prompts import Renderer
from thresher.engine.protocol.trajectory import Segment, Trajectory
from thresher.engine.store.checkpoint import latest_checkpoint
from thresher.engine.store.run_folder import RunFolder, step_of
from thresher.engine.world.facts import Size
from thresher.engine.world.files import invent_files
from thresher.engine.world.random_model import initialise
from thresher.engine.world.stages import DEMO
from thresher.policy.model import Policy, load_policy
from thresher.policy.tokenizer import load_tokenizer
from thresher.rewards.transcript import Source

GROUP = 8  # scripted trajectories whose advantages are made together, as the demo's samples of a question are
VOCABULARY = 800  # tokens of the scripted batch's tokenizer, as in the demo


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What the treatments are applied to. advantages[n] belongs to trajectories[n], which has policy tokens."""

    name: str  # where it comes from, in words
    policy: Policy  # float32
    vocab_size: int  # the tokenizer's: columns of the head that exist
    trajectories: list[Trajectory]
    advantages: list[float]
    grpo: GrpoSection
    temperature: float
    micro_batch_tokens: int

    def count(self, source: Source) -> int:
        return sum(trajectory.count(source) for trajectory in self.trajectories)

    @property
    def retrieved_share(self) -> float:
        """Retrieved tokens among those that were retrieved or sampled."""
        retrieved = self.count(Source.RETRIEVED)
        return retrieved / (retrieved + self.count(Source.POLICY))

    def with_trajectories(self, trajectories: Sequence[Trajectory]) -> "Subject":
        """The same with other trajectories for the first so many."""
        return replace(self, trajectories=list(trajectories), advantages=self.advantages[: len(trajectories)])


def scripted(seed: int, limit: int, device: str) -> Subject:
    """`limit` transcripts of the demo's world on a model of the demo's shape; a function of the seed."""
    recipe = load_recipe(DEMO / "recipe.toml")
    passage_format = recipe.need(RetrievalSection).passage_format
    with tempfile.TemporaryDirectory() as scratch:
        data, model = Path(scratch) / "data", Path(scratch) / "model"
        invent_files(data, seed, replace(Size(), warmup_worlds=1, transcripts=limit), passage_format)
        train_on = [data / f"{name}.jsonl" for name in ("corpus", "train", "warmup")]
        initialise(DEMO / "config.json", model, train_on=train_on, vocab_size=VOCABULARY, seed=seed)
        records = [record for _, record in iter_jsonl(data / "warmup.jsonl")]
        tokenizer = load_tokenizer(model)
        policy = load_policy(model, torch.float32, device)
    renderer = Renderer(
        tokenizer=tokenizer, tags=(), k=1, chat=False, max_passage_tokens=1, passage_format=passage_format
    )
    template = read_template(DEMO / "prompt.txt")
    trajectories = []
    for number, record in enumerate(records):
        segments = [Segment(Source.PROMPT, renderer.prompt(Prompt(template, record["question"])))]
        segments += [Segment(Source(part["source"]), tokenizer.encode(part["text"])) for part in record["segments"]]
        trajectories.append(Trajectory(record["id"], number // GROUP, number % GROUP, segments))
    rewards = [float(number % 2) for number in range(len(trajectories))]
    return Subject(
        name="scripted transcripts, a model of the demo's shape with random weights",
        policy=policy.requires_grad_(True),
        vocab_size=tokenizer.vocab_size,
        trajectories=trajectories,
        advantages=advantages(rewards, [trajectory.group for trajectory in trajectories], recipe.grpo),
        **_settings(recipe),
    )


def stored(folder: str | Path, limit: int, device: str) -> Subject:
    """At most `limit` trajectories of the last step that a run kept, groups with a signal first, on its last weights.

    folder: of `thresher train`, or of `thresher demo`, which holds one. UserError if it lacks what is needed.
    """
    path = Path(folder)
    if not (path / "recipe.toml").is_file() and (path / "grpo" / "recipe.toml").is_file():
        path /= "grpo"
    run = RunFolder.existing(path)
    recipe = load_recipe(run.recipe_file)
    checkpoint = latest_checkpoint(run.checkpoints)
    if checkpoint is None:
        raise UserError(f"{run.checkpoints}: holds no checkpoint; let the run reach its first, or name another run")
    kept = {step: file for file in run.trajectories.glob("*.jsonl") if (step := step_of(file.stem)) is not None}
    if not kept:
        raise UserError(f"{run.trajectories}: holds no trajectories; train with run.keep_trajectories=1")
    step = max(kept)
    policy = load_policy(checkpoint.path, torch.float32, device)
    vocab_size = load_tokenizer(checkpoint.path).vocab_size
    pairs = _signal_first(_read(kept[step], vocab_size))[:limit]
    if not any(value for _, value in pairs):
        raise UserError(f"{kept[step]}: no trajectory has an advantage, so there is no gradient; name another run")
    if not any(trajectory.count(Source.RETRIEVED) for trajectory, _ in pairs):
        raise UserError(f"{kept[step]}: nothing in it was retrieved, so there is nothing to mask; name another run")
    return Subject(
        name=f"step {step} of {path}, weights of step {checkpoint.step}",
        policy=policy.requires_grad_(True),
        vocab_size=vocab_size,
        trajectories=[trajectory for trajectory, _ in pairs],
        advantages=[value for _, value in pairs],
        **_settings(recipe),
    )


def _settings(recipe: Recipe) -> dict[str, Any]:
    # A trajectory without an advantage stays in, so that trajectories and items are one list.
    return {
        "grpo": replace(recipe.grpo, drop_zero_advantage=False),
        "temperature": recipe.rollout.temperature,
        "micro_batch_tokens": recipe.optim.micro_batch_tokens,
    }


def _read(file: Path, vocab_size: int) -> list[tuple[Trajectory, float]]:
    """Trajectories with their advantages. UserError names the line of one that is malformed."""
    pairs = []
    for number, record in read_records(file):
        try:
            segments = [Segment(Source(part["source"]), list(map(int, part["ids"]))) for part in record["segments"]]
            trajectory = Trajectory(str(record["id"]), int(record["group"]), int(record["sample"]), segments)
            advantage = float(record["advantage"])
        except (LookupError, TypeError, ValueError) as error:
            raise UserError(
                f"{file}:{number}: expected a trajectory as training writes it, with segments of source and ids and "
                f"an advantage, but {error!r}"
            ) from error
        outside = [token for token in trajectory.ids() if not 0 <= token < vocab_size]
        rows = without_retrieved(trajectory).policy_positions()
        if outside or not rows or rows[0] == 0 or not math.isfinite(advantage):
            raise UserError(
                f"{file}:{number}: expected ids below {vocab_size}, policy tokens behind a prompt, and a finite "
                "advantage; name the run folder that the trajectories belong to"
            )
        pairs.append((trajectory, advantage))
    return pairs


def _signal_first(pairs: Sequence[tuple[Trajectory, float]]) -> list[tuple[Trajectory, float]]:
    """Groups whose rewards differ before those where they agree; a group stays together."""
    groups: dict[int, list[tuple[Trajectory, float]]] = defaultdict(list)
    for trajectory, value in pairs:
        groups[trajectory.group].append((trajectory, value))
    ordered = sorted(groups.values(), key=lambda group: not any(value for _, value in group))
    return [pair for group in ordered for pair in group]


def without_retrieved(trajectory: Trajectory) -> Trajectory:
    """The trajectory with its retrieved segments cut out, so that what follows moves up."""
    return replace(trajectory, segments=[part for part in trajectory.segments if part.source is not Source.RETRIEVED])


def retrieved_rows(trajectory: Trajectory) -> list[int]:
    """Positions of the retrieved tokens; position 0 is never one, for nothing predicts it."""
    rows: list[int] = []
    at = 0
    for segment in trajectory.segments:
        if segment.source is Source.RETRIEVED:
            rows.extend(range(max(at, 1), at + len(segment.ids)))
        at += len(segment.ids)
    return rows


def stretched(trajectories: Sequence[Trajectory], share: float) -> list[Trajectory]:
    """The trajectories with retrieved segments cut short, or repeated, until `share` of the tokens that were retrieved
    or sampled are retrieved ones (up to rounding). A trajectory that retrieved nothing stays as it is."""
    retrieved = sum(trajectory.count(Source.RETRIEVED) for trajectory in trajectories)
    sampled = sum(trajectory.count(Source.POLICY) for trajectory in trajectories)
    factor = share / (1 - share) * sampled / retrieved

    def resized(segment: Segment) -> Segment:
        if segment.source is not Source.RETRIEVED:
            return segment
        return replace(segment, ids=list(islice(cycle(segment.ids), round(factor * len(segment.ids)))))

    return [replace(trajectory, segments=list(map(resized, trajectory.segments))) for trajectory in trajectories]
