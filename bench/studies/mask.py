"""`thresher study mask`: the cost of masking retrieved tokens, and its effect on the gradient.

One batch of trajectories (scripted, stored by a run, or sampled by a recipe), four treatments: time, memory and
gradient of each, then the cost against the share of retrieved tokens. Prints a table and findings, writes mask.json and
mask.png. Nothing is trained.

    in the loss   every retrieved token is a target too, with its trajectory's advantage and an old log-prob from an
                  additional forward, because it was not sampled
    zeroed        the same rows go through the head, and the result of the retrieved ones is multiplied by 0: the usual
                  way to mask a loss
    masked        rows that predict a retrieved token never reach the head: what Thresher does
    removed       the retrieved tokens are cut out of the input and the rest is prefilled again

All four use the product's own packing, forward and loss kernel. The kernel drops a row of weight 0 before the head, so
"zeroed" gives the retrieved rows `FAINT` of their weight, which is below float32's rounding in the gradient. A row has
the same weight under every treatment (1/(N |y|) if the recipe says so, |y| being the sampled tokens), so that the
gradient of "in the loss" minus that of "masked" is the gradient of the retrieved rows. Old log-probs are the policy's
own under the same treatment: every ratio is 1 and nothing is clipped.

Axes: T packed tokens, R rows at the head, H hidden.
"""

import json
import math
import platform
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from thresher.bench.harness import MIB, in_turn, peak_bytes, wait
from thresher.bench.studies.runs import ModelRecipe, load_task
from thresher.common import console
from thresher.common.errors import UserError
from thresher.common.files import atomic_write_text, staged_folder
from thresher.common.jsonl import iter_jsonl
from thresher.common.machine import KEEP_MEMORY, set_malloc
from thresher.common.records import read_records
from thresher.engine.assemble import load_judges
from thresher.engine.config.recipe import Recipe, load_recipe
from thresher.engine.config.sections import GrpoSection, RetrievalSection, SystemSection
from thresher.engine.episode import Prompt, read_template
from thresher.engine.packing import MicroBatch, TrainSequence, build_train_sequences, grpo_advantages, pack
from thresher.engine.parallel.ranks import SINGLE
from thresher.engine.protocol.prompts import Renderer
from thresher.engine.protocol.trajectory import Segment, Trajectory
from thresher.engine.store.checkpoint import latest_checkpoint
from thresher.engine.store.run_folder import RunFolder, step_of
from thresher.engine.systems import load_system
from thresher.engine.training.step import GrpoStep
from thresher.engine.training.weights import load_updater
from thresher.engine.world.facts import Size
from thresher.engine.world.files import invent_files
from thresher.engine.world.random_model import initialise
from thresher.engine.world.stages import DEMO
from thresher.kernels import grpo_loss, token_logprobs
from thresher.kernels.objective import LossResult
from thresher.policy.model import Policy, load_policy
from thresher.policy.tokenizer import load_tokenizer
from thresher.rewards.reward import Source

GROUP = 8  # scripted trajectories whose advantages are computed together, like the demo's samples of a question
VOCABULARY = 800  # tokens of the scripted batch's tokenizer, as in the demo
TREATMENTS = {"in_loss": "in the loss", "zeroed": "zeroed", "masked": "masked", "removed": "removed"}
FAINT = 1e-10  # of a row's weight: below half a unit in the last place of float32 (6e-8), far above its denormals
SHARES = (0.3, 0.5, 0.7, 0.8, 0.9)  # retrieved tokens / retrieved or sampled tokens
SWEEP_TRAJECTORIES, SWEEP_REPEATS = 16, 15  # at most; a quarter of a smaller batch, and 2 R + 1 for R repeats
PER_ROW = ("targets_R", "old_logprobs_R", "advantages_R", "weights_R")  # tensors of a batch

Gradient = dict[str, Tensor]
Record = dict[str, Any]


# the batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A policy and its trajectories. advantages[n] belongs to trajectories[n], which has policy tokens.

    A run folder does not have the log-probs recorded at sampling, so every treatment computes its own.
    """

    name: str  # its origin, in words
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
        """Return the share of retrieved tokens among those that were retrieved or sampled."""
        retrieved = self.count(Source.RETRIEVED)
        return retrieved / (retrieved + self.count(Source.POLICY))


def scripted(seed: int, limit: int, device: str) -> Subject:
    """Make `limit` transcripts of the demo's world on a model of the demo's shape with random weights. Every second
    transcript counts as right; the result is a function of the seed. Rows, times and memory are those of a real step of
    that size."""
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
        advantages=grpo_advantages(rewards, [trajectory.group for trajectory in trajectories], recipe.grpo),
        **_settings(recipe),
    )


def stored(folder: str | Path, limit: int, device: str) -> Subject:
    """Read at most `limit` trajectories of the last step that a run kept, groups with a signal first, and its weights.

    folder: of `thresher train`, or of `thresher demo`, which contains one. UserError if a required file is missing.
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
    return Subject(
        name=f"step {step} of {path}, weights of step {checkpoint.step}",
        policy=policy.requires_grad_(True),
        vocab_size=vocab_size,
        **_chosen(_read(kept[step], vocab_size), limit, str(kept[step]), "name another run"),
        **_settings(recipe),
    )


def sampled(chosen: ModelRecipe, limit: int, device: str) -> Subject:
    """Sample a training step of the recipe, and take at most `limit` of its trajectories, groups with a signal first.

    UserError for a recipe that retrieves no text after the prompt, and if the samples have nothing to study.
    """
    recipe = chosen.read(f"model.device={device}", "model.dtype=float32", "grpo.beta=0", "grpo.reference=")
    section = recipe.need(SystemSection)
    if not load_system(section.name, section.options).needs_index:
        raise UserError(
            f"{chosen.path}: system {section.name} retrieves nothing between its turns, and what is in the prompt is "
            "never trained, so there is nothing to mask; name a recipe that searches"
        )
    if recipe.lora is not None:
        raise UserError(f"{chosen.path}: the study takes the gradient of all weights; leave [lora] out")
    task, rollout = load_task(recipe), recipe.rollout
    count = rollout.questions_per_step * rollout.group_size
    console.console.print(f"study mask: sampling {count} trajectories of {chosen.path}", soft_wrap=True)
    with tempfile.TemporaryDirectory() as scratch, task.context.threads():
        step = GrpoStep(
            context=task.context,
            questions=task.questions,
            rollout=task.rollout,
            judges=load_judges(recipe, task.context.system, Path(scratch) / "replies.jsonl", (), rewarded_only=True),
            updater=load_updater(recipe, task.context, None, SINGLE),  # makes the weights trainable
        )
        result = step.collect(1)
    if device == "cpu":
        set_malloc(*KEEP_MEMORY)  # as in a training run
    pairs = list(zip((entry.trajectory for entry in result.scored), result.advantages, strict=True))
    name = f"a step of {chosen.path}, sampled by {recipe.model.path}"
    return Subject(
        name=name,
        policy=task.context.policy,
        vocab_size=task.context.vocab_size,
        **_chosen(pairs, limit, name, "name another model or recipe, or --set run.seed"),
        **_settings(recipe),
    )


def _chosen(pairs: Sequence[tuple[Trajectory, float]], limit: int, where: str, remedy: str) -> dict[str, Any]:
    """Return at most `limit` trajectories with their advantages. UserError if none of them can be studied."""
    pairs = _signal_first(pairs)[:limit]
    if not any(value for _, value in pairs):
        raise UserError(f"{where}: no trajectory has an advantage, so there is no gradient; {remedy}")
    if not any(trajectory.count(Source.RETRIEVED) for trajectory, _ in pairs):
        raise UserError(f"{where}: nothing in it was retrieved, so there is nothing to mask; {remedy}")
    return {"trajectories": [trajectory for trajectory, _ in pairs], "advantages": [value for _, value in pairs]}


def _settings(recipe: Recipe) -> dict[str, Any]:
    # Trajectories without an advantage are kept, so that trajectories and items are one list.
    return {
        "grpo": replace(recipe.grpo, drop_zero_advantage=False),
        "temperature": recipe.rollout.temperature,
        "micro_batch_tokens": recipe.optim.micro_batch_tokens,
    }


def _read(file: Path, vocab_size: int) -> list[tuple[Trajectory, float]]:
    """Read trajectories with their advantages. UserError names the line of a malformed one."""
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
                f"{file}:{number}: expected ids below {vocab_size}, policy tokens after a prompt, and a finite "
                "advantage; name the run folder that the trajectories belong to"
            )
        pairs.append((trajectory, advantage))
    return pairs


def _signal_first(pairs: Sequence[tuple[Trajectory, float]]) -> list[tuple[Trajectory, float]]:
    """Return groups with an advantage before those without; groups stay together."""
    groups: dict[int, list[tuple[Trajectory, float]]] = defaultdict(list)
    for trajectory, value in pairs:
        groups[trajectory.group].append((trajectory, value))
    return [p for group in sorted(groups.values(), key=lambda g: not any(value for _, value in g)) for p in group]


def without_retrieved(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory without its retrieved segments, so that later segments move up."""
    return replace(trajectory, segments=[part for part in trajectory.segments if part.source is not Source.RETRIEVED])


def retrieved_rows(trajectory: Trajectory) -> list[int]:
    """Return positions of the retrieved tokens, without position 0, which nothing predicts."""
    rows: list[int] = []
    at = 0
    for segment in trajectory.segments:
        if segment.source is Source.RETRIEVED:
            rows.extend(range(max(at, 1), at + len(segment.ids)))
        at += len(segment.ids)
    return rows


def stretched(trajectories: Sequence[Trajectory], share: float) -> list[Trajectory]:
    """Return the trajectories with retrieved segments cut or repeated to reach a share of retrieved tokens. share: of
    the tokens that were retrieved or sampled (up to rounding). A trajectory that retrieved nothing is unchanged."""
    retrieved = sum(trajectory.count(Source.RETRIEVED) for trajectory in trajectories)
    sampled = sum(trajectory.count(Source.POLICY) for trajectory in trajectories)
    factor = share / (1 - share) * sampled / retrieved

    def resized(segment: Segment) -> Segment:
        if segment.source is not Source.RETRIEVED:
            return segment
        return replace(segment, ids=list(islice(cycle(segment.ids), round(factor * len(segment.ids)))))

    return [replace(trajectory, segments=list(map(resized, trajectory.segments))) for trajectory in trajectories]


# the treatments


@dataclass(frozen=True, slots=True)
class Treated:
    """A treatment's items, their packed batches, and for each batch [R] bool: True for rows with a sampled target."""

    items: list[TrainSequence]
    batches: list[MicroBatch]
    sampled: list[Tensor]

    @property
    def rows(self) -> int:
        return sum(len(batch.rows_R) for batch in self.batches)

    @property
    def tokens(self) -> int:
        return sum(batch.tokens for batch in self.batches)

    def weighted(self, *, retrieved: float, sampled: float = 1.0) -> "Treated":
        """Return a copy with the weights of both kinds of rows multiplied; a factor of 0 drops them."""
        batches = [
            replace(batch, weights_R=batch.weights_R * torch.where(sampled_R, sampled, retrieved))
            for batch, sampled_R in zip(self.batches, self.sampled, strict=True)
        ]
        return replace(self, batches=batches)


PARTS = ("forward", "head", "backward")
Clock = dict[str, list[float]]  # milliseconds of each of PARTS, one entry per step


def treat(name: str, subject: Subject) -> Treated:
    """Pack the subject's trajectories under one treatment, with the policy's own log-probs as the old ones."""
    trajectories = subject.trajectories
    if name == "removed":
        trajectories = [without_retrieved(trajectory) for trajectory in trajectories]
    items = build_train_sequences(trajectories, subject.advantages, subject.grpo)
    sampled = [set(item.positions) for item in items]
    if name in ("in_loss", "zeroed"):
        items = [
            replace(item, positions=sorted(item.positions + retrieved_rows(trajectory)))
            for item, trajectory in zip(items, trajectories, strict=True)
        ]
    device = subject.policy.device
    batches = []
    for batch in pack(items, subject.micro_batch_tokens, device):
        with torch.no_grad():
            old_R, _ = token_logprobs(
                hidden_states(subject.policy, batch).index_select(0, batch.rows_R),
                subject.policy.head_VH,
                batch.targets_R,
                temperature=subject.temperature,
                vocab_size=subject.vocab_size,
            )
        batches.append(replace(batch, old_logprobs_R=old_R))
    flags = [[row in sampled[n] for n in batch.members for row in items[n].positions] for batch in batches]
    treated = Treated(items, batches, [torch.tensor(flags_R, device=device) for flags_R in flags])
    return treated.weighted(retrieved=FAINT) if name == "zeroed" else treated


def hidden_states(policy: Policy, batch: MicroBatch) -> Tensor:
    return policy.hidden(batch.ids_T, batch.layout.positions_T, batch.layout)


def head_loss(subject: Subject, rows_RH: Tensor, batch: MicroBatch, chunk_rows: int | None = None) -> LossResult:
    """Compute the loss of some rows; the head's gradient is added to its buffer, as in training."""
    head_VH, grpo = subject.policy.head_VH, subject.grpo
    return grpo_loss(
        rows_RH,
        head_VH,
        batch.targets_R,
        batch.old_logprobs_R,
        batch.advantages_R,
        batch.weights_R,
        temperature=subject.temperature,
        clip_low=grpo.clip_low,
        clip_high=grpo.clip_high,
        dual_clip=grpo.dual_clip,
        vocab_size=subject.vocab_size,
        chunk_rows=chunk_rows,
        lm_head_grad_VH=head_VH.grad,
    )


def clear(policy: Policy) -> None:
    """Remove the gradients, and set the head's to zeros, which the loss adds to."""
    policy.zero_grad(set_to_none=True)
    policy.head_VH.grad = torch.zeros_like(policy.head_VH)


def run_step(subject: Subject, batches: Iterable[MicroBatch], clock: Clock | None = None) -> list[LossResult]:
    """Run forward, head with loss, and backward of all batches; the gradients stay on the policy."""
    policy = subject.policy
    clear(policy)
    spent, results = [0.0, 0.0, 0.0], []
    for batch in batches:
        marks = [_now(policy.device)]
        hidden_TH = hidden_states(policy, batch)
        marks.append(_now(policy.device))
        rows_RH = hidden_TH.index_select(0, batch.rows_R)
        result = head_loss(subject, rows_RH, batch)
        marks.append(_now(policy.device))
        rows_RH.backward(result.hidden_grad_TH)
        marks.append(_now(policy.device))
        spent = [total + 1e3 * (end - start) for total, (start, end) in zip(spent, pairwise(marks), strict=True)]
        results.append(result)
    if clock is not None:
        for part, value in zip(PARTS, spent, strict=True):
            clock[part].append(value)
    return results


def _now(device: torch.device) -> float:
    wait(device)
    return time.perf_counter()


def timed(
    subject: Subject, treated: Mapping[str, Treated], repeats: int, tick: Callable[[], None] = lambda: None
) -> dict[str, Clock]:
    """Time `repeats` steps of each treatment, in turn, after an untimed one."""
    clocks: dict[str, Clock] = {name: {part: [] for part in PARTS} for name in treated}
    calls = [partial(run_step, subject, treated[name].batches, clock) for name, clock in clocks.items()]
    in_turn(calls, 1 + repeats, subject.policy.device, tick)
    return {name: {part: times[1:] for part, times in clock.items()} for name, clock in clocks.items()}


def timed_heads(
    subject: Subject, treated: Mapping[str, Treated], repeats: int, tick: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Return median milliseconds of only head and loss, from hidden states that are computed once."""

    heads = [[head_call(subject, batch, None) for batch in one.batches] for one in treated.values()]
    calls = [lambda every=every: [call() for call in every] for every in heads]
    clear(subject.policy)
    times = in_turn(calls, 1 + repeats, subject.policy.device, tick)
    return {name: median(spent[1:]) for name, spent in zip(treated, times, strict=True)}


def head_call(subject: Subject, batch: MicroBatch, chunk_rows: int | None) -> Callable[[], None]:
    """Return a call for only head and loss of one batch: the gather of its rows, and both gradients."""
    with torch.no_grad():
        hidden_TH = hidden_states(subject.policy, batch)

    def call() -> None:
        head_loss(subject, hidden_TH.index_select(0, batch.rows_R).requires_grad_(), batch, chunk_rows)

    return call


def head_peak(subject: Subject, treated: Treated, at_once: bool) -> int:
    """Return the peak bytes of only head and loss, over the batches. at_once: all logits of a batch in one chunk."""
    clear(subject.policy)
    return max(
        peak_bytes(head_call(subject, batch, len(batch.rows_R) if at_once else None), subject.policy.device)
        for batch in treated.batches
    )


def step_peak(subject: Subject, treated: Treated) -> int:
    """Return the peak bytes of a step; gradients of an earlier one are freed before."""
    subject.policy.zero_grad(set_to_none=True)
    return peak_bytes(partial(run_step, subject, treated.batches), subject.policy.device)


# the study


def run_study(out: Path, run: str | ModelRecipe | None, seed: int, repeats: int, limit: int, device: str) -> None:
    """Write the study. run: a run folder, a recipe to sample with, or None for the scripted batch. out: a folder that
    must not exist yet."""
    if out.exists():
        raise UserError(f"{out}: exists already; choose another folder with --out")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device is cuda, but torch sees no CUDA device; leave it out")
    started = time.perf_counter()
    if run is None:
        subject = scripted(seed, limit, device)
    else:
        subject = sampled(run, limit, device) if isinstance(run, ModelRecipe) else stored(run, limit, device)
    steps, heads = len(TREATMENTS) * (repeats + 1), len(TREATMENTS) * len(SHARES) * (sweep_repeats(repeats) + 1)
    console.console.print(
        f"study mask: {len(subject.trajectories)} trajectories with {subject.count(Source.RETRIEVED):,} retrieved and "
        f"{subject.count(Source.POLICY):,} sampled tokens; {subject.name}; {steps} timed "
        "steps, and the head alone against the share of retrieved tokens",
        soft_wrap=True,
    )
    figures: Record = {"batch": describe(subject), "machine": machine(device), "repeats": repeats}
    with console.progress_line("steps", steps) as line:
        figures |= measure(subject, repeats, lambda: line.to(line.done + 1, ""))
    with console.progress_line("heads", heads) as line:
        figures["sweep"] = sweep(subject, sweep_repeats(repeats), lambda: line.to(line.done + 1, ""))
    figures["seconds"] = time.perf_counter() - started
    from thresher.bench.plots import draw_mask  # importing matplotlib takes a second, after the checks

    with staged_folder(out) as staged:
        atomic_write_text(staged / "mask.json", json.dumps(figures, indent=1, allow_nan=False) + "\n")
        draw_mask(figures, TREATMENTS, staged / "mask.png")
    show(figures)
    console.console.print(f"{figures['seconds']:.0f} s. Look at {out / 'mask.png'}", soft_wrap=True)


def describe(subject: Subject) -> Record:
    config = subject.policy.config
    return {
        "from": subject.name,
        "trajectories": len(subject.trajectories),
        "tokens": {str(source): subject.count(source) for source in Source},
        "retrieved_share": subject.retrieved_share,
        "parameters": subject.policy.parameter_count(),
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": subject.vocab_size,
        "aggregation": subject.grpo.aggregation,
        "temperature": subject.temperature,
    }


def machine(device: str) -> Record:
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    return {"device": device, "name": name, "threads": torch.get_num_threads(), "torch": torch.__version__}


def measure(subject: Subject, repeats: int, tick: Callable[[], None]) -> Record:
    """Return all figures of the unchanged batch: cost and gradient of each treatment, and the checks."""
    treated = {name: treat(name, subject) for name in TREATMENTS}
    clocks = timed(subject, treated, repeats, tick)
    base = gradient(subject, treated["masked"].batches)
    treatments = {
        name: {
            "tokens": one.tokens,
            "rows": one.rows,
            **{f"{part}_ms": median(times) for part, times in clocks[name].items()},
            "step_ms": median(map(sum, zip(*clocks[name].values(), strict=True))),
            "times_ms": clocks[name],
            "head_mib": head_peak(subject, one, at_once=False) / MIB,
            "head_at_once_mib": head_peak(subject, one, at_once=True) / MIB,
            "step_mib": step_peak(subject, one) / MIB,
            **effect(subject, one, base),
        }
        for name, one in treated.items()
    }
    alone = gradient(subject, treated["in_loss"].weighted(retrieved=1.0, sampled=0.0).batches)
    return {
        "treatments": treatments,
        "retrieved_alone": compare(alone, base),
        "removal": removal(treated["masked"], treated["removed"], subject.grpo.clip_low, subject.grpo.clip_high),
        "poison_changes_nothing": poison_changes_nothing(subject, treated["in_loss"]),
    }


def effect(subject: Subject, treated: Treated, base: Gradient) -> Record:
    """Compare a treatment's gradient, which is then freed, with `base`; and its kinds of rows."""
    results = run_step(subject, treated.batches)
    found = gradients_of(subject.policy)
    return {
        "gradient": compare(found, base),
        "gradient_parts": compare_parts(found, base),
        "kinds": row_figures(treated, results),
    }


def gradient(subject: Subject, batches: Sequence[MicroBatch]) -> Gradient:
    """Compute the gradient of every parameter, as copies."""
    run_step(subject, batches)
    return gradients_of(subject.policy)


def gradients_of(policy: Policy) -> Gradient:
    return {
        name: torch.zeros_like(value) if value.grad is None else value.grad.clone()
        for name, value in policy.named_parameters()
    }


def part_of(name: str) -> str:
    """Return a parameter's part of the model: "embedding, head", "layer 0 attention" or "layer 0 mlp"."""
    if not name.startswith("layers."):
        return "embedding, head"
    _, layer, weight = name.split(".")
    return f"layer {layer} {'mlp' if weight in ('post_norm', 'gate_up_weight', 'down_weight') else 'attention'}"


def compare(one: Gradient, base: Gradient) -> dict[str, float]:
    """Return the norm of a gradient, and its comparison with another one. These are the cosine, and the norms of it and
    of the difference relative to the other's norm (0 if either is 0)."""
    norm, of_base = (sum(_dot(value, value) for value in side.values()) ** 0.5 for side in (one, base))
    dot = sum(_dot(one[name], base[name]) for name in one)
    gaps = (one[name].double() - base[name].double() for name in one)
    difference = sum(_dot(gap, gap) for gap in gaps) ** 0.5
    known = norm > 0 and of_base > 0
    return {
        "norm": norm,
        "cosine": dot / (norm * of_base) if known else 0.0,
        "relative_norm": norm / of_base if known else 0.0,
        "difference": difference / of_base if known else 0.0,
    }


def _dot(one: Tensor, other: Tensor) -> float:
    return float((one.double() * other.double()).sum())


def compare_parts(one: Gradient, base: Gradient) -> dict[str, dict[str, float]]:
    """Compare each part of the model, in the order of the forward."""
    parts: dict[str, list[str]] = {}
    for name in one:
        parts.setdefault(part_of(name), []).append(name)
    return {
        part: compare({name: one[name] for name in names}, {name: base[name] for name in names})
        for part, names in parts.items()
    }


def row_figures(treated: Treated, results: Sequence[LossResult]) -> dict[str, dict[str, float]]:
    """Return the figures of sampled and of retrieved rows. They are the number, mean log-prob and entropy, and the
    share of the push: the sum of the norms of the rows' gradients at the head's input."""
    sampled_R = torch.cat(treated.sampled)
    logprobs_R = torch.cat([result.logprobs for result in results]).double()
    entropy_R = torch.cat([result.entropy for result in results]).double()
    grads = [result.hidden_grad_TH for result in results if result.hidden_grad_TH is not None]
    push_R = torch.cat(grads).double().norm(dim=1)
    return {
        kind: {
            "rows": int(chosen_R.sum()),
            "logprob": float(logprobs_R[chosen_R].mean()),
            "entropy": float(entropy_R[chosen_R].mean()),
            "push": float(push_R[chosen_R].sum() / push_R.sum()),
        }
        for kind, chosen_R in (("sampled", sampled_R), ("retrieved", ~sampled_R))
        if chosen_R.any()
    }


def removal(masked: Treated, removed: Treated, low: float, high: float) -> dict[str, float]:
    """Return the effect of removal on the log-probs of sampled tokens. It has their mean distance from those in full
    context, and the share with a ratio to these outside [1 - low, 1 + high], the clip range."""
    gap_R = _by_item(removed) - _by_item(masked)
    outside_R = (gap_R.exp() < 1 - low) | (gap_R.exp() > 1 + high)
    return {"logprob_gap": float(gap_R.abs().mean()), "outside_clip": float(outside_R.double().mean())}


def _by_item(treated: Treated) -> Tensor:
    """Return all rows' log-probs in the order of the items, because each treatment packs them in another order."""
    found: dict[int, Tensor] = {}
    for batch in treated.batches:
        counts = [len(treated.items[n].positions) for n in batch.members]
        found |= zip(batch.members, batch.old_logprobs_R.split(counts), strict=True)
    return torch.cat([found[n] for n in sorted(found)]).double()


def poison_changes_nothing(subject: Subject, in_loss: Treated) -> bool:
    """Return True if loss and gradients have the same bits with poisoned retrieved rows at weight 0 as without them.
    Hidden states, old log-probs and advantages of these rows are NaN, their targets outside the vocabulary."""
    policy = subject.policy
    for batch, sampled_R in zip(in_loss.batches, in_loss.sampled, strict=True):
        with torch.no_grad():
            rows_RH = hidden_states(policy, batch).index_select(0, batch.rows_R)
        nan = float("nan")
        poisoned = replace(
            batch,
            targets_R=batch.targets_R.where(sampled_R, -1),
            old_logprobs_R=batch.old_logprobs_R.where(sampled_R, nan),
            advantages_R=batch.advantages_R.where(sampled_R, nan),
            weights_R=batch.weights_R.where(sampled_R, 0.0),
        )
        present = replace(batch, **{name: getattr(batch, name)[sampled_R] for name in PER_ROW})
        found = []
        for rows, part in ((rows_RH.where(sampled_R[:, None], nan), poisoned), (rows_RH[sampled_R], present)):
            clear(policy)
            result = head_loss(subject, rows.requires_grad_(), part)
            assert result.hidden_grad_TH is not None and policy.head_VH.grad is not None
            found.append((result.loss, result.hidden_grad_TH, policy.head_VH.grad))
        (loss, hidden_RH, head_VH), (other_loss, other_RH, other_VH) = found
        same = torch.equal(loss, other_loss) and torch.equal(head_VH, other_VH)
        if not same or not torch.equal(hidden_RH[sampled_R], other_RH) or bool(hidden_RH[~sampled_R].any()):
            return False
    return True


def sweep_repeats(repeats: int) -> int:
    return min(SWEEP_REPEATS, 2 * repeats + 1)


def sweep(subject: Subject, repeats: int, tick: Callable[[], None]) -> list[Record]:
    """Measure the head against the share of retrieved tokens, on a part of the batch that retrieved some."""
    order = sorted(range(len(subject.trajectories)), key=lambda n: not subject.trajectories[n].count(Source.RETRIEVED))
    chosen = order[: min(SWEEP_TRAJECTORIES, -(-len(order) // 4))]
    trajectories = [subject.trajectories[n] for n in chosen]
    records = []
    for share in SHARES:
        part = replace(
            subject,
            trajectories=stretched(trajectories, share),
            advantages=[subject.advantages[n] for n in chosen],
        )
        treated = {name: treat(name, part) for name in TREATMENTS}
        times = timed_heads(part, treated, repeats, tick)
        records.append(
            {
                "retrieved_share": part.retrieved_share,
                "treatments": {
                    name: {
                        "tokens": one.tokens,
                        "rows": one.rows,
                        "head_ms": times[name],
                        "head_mib": head_peak(part, one, at_once=False) / MIB,
                        "head_at_once_mib": head_peak(part, one, at_once=True) / MIB,
                    }
                    for name, one in treated.items()
                },
            }
        )
    return records


def show(figures: Mapping[str, Any]) -> None:
    """Print the table, one column per treatment, and the findings in words."""
    treatments, where = figures["treatments"], figures["machine"]
    rows: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
        ("tokens in the forward", lambda one: f"{one['tokens']:,}"),
        ("rows at the head", lambda one: f"{one['rows']:,}"),
        ("forward, ms", lambda one: f"{one['forward_ms']:.1f}"),
        ("head and loss, ms", lambda one: f"{one['head_ms']:.1f}"),
        ("backward, ms", lambda one: f"{one['backward_ms']:.1f}"),
        ("the step, ms", lambda one: f"{one['step_ms']:.1f}"),
        ("head and loss, peak MiB", lambda one: f"{one['head_mib']:.1f}"),
        ("the same, all logits at once", lambda one: f"{one['head_at_once_mib']:.1f}"),
        ("the step, peak MiB", lambda one: f"{one['step_mib']:.1f}"),
        ("norm of the gradient", lambda one: f"{one['gradient']['norm']:.3g}"),
        ("cosine with masked", lambda one: f"{one['gradient']['cosine']:.3f}"),
        ("difference, in masked's norms", lambda one: f"{one['gradient']['difference']:.2g}"),
        ("push of retrieved rows", lambda one: _kind(one, "retrieved", "push", ".0%")),
        ("log-prob, sampled tokens", lambda one: _kind(one, "sampled", "logprob", ".2f")),
        ("log-prob, retrieved tokens", lambda one: _kind(one, "retrieved", "logprob", ".2f")),
        ("entropy, sampled tokens", lambda one: _kind(one, "sampled", "entropy", ".2f")),
        ("entropy, retrieved tokens", lambda one: _kind(one, "retrieved", "entropy", ".2f")),
    ]
    console.table(
        f"one batch, four treatments; median of {figures['repeats']} on {where['device']}, {where['threads']} threads",
        ("", *TREATMENTS.values()),
        [(label, *(text(treatments[name]) for name in TREATMENTS)) for label, text in rows],
    )
    for text in findings(figures):
        console.console.print(f"- {text}", soft_wrap=True)


def _kind(one: Mapping[str, Any], kind: str, key: str, form: str) -> str:
    """Return a figure of one kind of rows; a dash if the treatment has no such rows at the head."""
    return format(one["kinds"][kind][key], form) if kind in one["kinds"] else "-"


def findings(figures: Mapping[str, Any]) -> list[str]:
    """Return the comparison in sentences with figures."""
    treatments, alone, moved = figures["treatments"], figures["retrieved_alone"], figures["removal"]
    in_loss, zeroed, masked, removed = (treatments[name] for name in TREATMENTS)
    retrieved = in_loss["kinds"]["retrieved"]
    return [
        f"In the loss: retrieved rows are {retrieved['rows'] / in_loss['rows']:.0%} of the rows and "
        f"{retrieved['push']:.0%} of the push at the head (norms of the rows' gradients, summed); their gradient alone "
        f"is {alone['relative_norm']:.2g} times as long as the masked one, with which the sum has cosine "
        f"{in_loss['gradient']['cosine']:.2f}.",
        f"Zeroed: masked's gradient (relative difference {zeroed['gradient']['difference']:.0e}) for "
        f"{zeroed['head_ms'] / masked['head_ms']:.1f} times the head's time and, where all logits are made at once, "
        f"{zeroed['head_at_once_mib'] / masked['head_at_once_mib']:.1f} times its memory.",
        f"Removed: {removed['tokens'] / masked['tokens']:.0%} of the tokens and "
        f"{removed['step_ms'] / masked['step_ms']:.0%} of the step's time, but another gradient (cosine "
        f"{removed['gradient']['cosine']:.2f}): without their context the sampled tokens' log-probs move by "
        f"{moved['logprob_gap']:.2g} on average, {moved['outside_clip']:.0%} of them out of the clip range.",
        "Masked rows poisoned with NaN: loss and gradient "
        + ("keep every bit." if figures["poison_changes_nothing"] else "CHANGED, which is a fault."),
    ]
