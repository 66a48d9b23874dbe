"""The plan of a run: its parts in bytes, whether they fit, and if not, which switch makes them fit.

    plan(config, recipe, memory_bytes=80_000_000_000, rates=CHIPS["H100"])

`thresher plan` prints it. A run checks it before it loads weights, and takes the values of settings on "auto" from it:
optim.checkpoint_activations and grpo.reference. memory.py and time.py have the formulas.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from thresher.common.console import console
from thresher.common.errors import UserError
from thresher.common.machine import cpu_memory
from thresher.engine.config.recipe import Recipe
from thresher.engine.planning.memory import (
    Demand,
    PlanSetting,
    demand,
    kv_bytes,
    read_setting,
    switches,
)
from thresher.engine.planning.tail import Tail, predicted_tail
from thresher.engine.planning.time import DeviceRates, link_rate, seconds_per_step
from thresher.policy.config import ModelConfig, read_config

GB = 10**9
MOST_GPUS = 64
ROUND = 256  # tokens
LORA = (16, ("q", "k", "v", "o", "gate", "up", "down"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Bytes of one GPU, and predicted times.

    total_bytes and parts: of the phase that needs the most, `peak`; phases: of each. fits: None if no memory was given.
    largest: the largest settings that fit, each varied alone; bounds: for settings that memory does not limit, what
    does. checkpointed: whether activations are recomputed; reference: where its copy is, None without one; both are the
    plan's choice for "auto". host: parts in host memory, with a GPU. seconds: predicted {"rollout", "update"} if rates
    were given, for trajectories at their limits; tail: rollouts with unequal sample lengths. links: bytes per second
    that a GPU sends to the others, None if not counted.
    """

    total_bytes: int
    parts: dict[str, int]
    peak: str
    phases: dict[str, dict[str, int]]
    gpus: int
    memory_bytes: int | None
    fits: bool | None
    checkpointed: bool
    reference: str | None = None
    host: dict[str, int] = field(default_factory=dict)
    largest: dict[str, int] = field(default_factory=dict)
    bounds: dict[str, str] = field(default_factory=dict)
    advice: list[str] = field(default_factory=list)
    seconds: dict[str, float] | None = None
    tail: Tail | None = None
    links: float | None = None

    @property
    def seconds_per_step(self) -> float | None:
        return None if self.seconds is None else sum(self.seconds.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the record that `thresher plan --json` prints."""
        apart = ("seconds", "tail", "links")
        plain = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in apart}
        tail = None if self.tail is None else asdict(self.tail)
        return plain | {"seconds_per_step": self.seconds_per_step, "seconds": self.seconds, "tail": tail}

    def sentence(self) -> str:
        """Return the parts in words, the largest first."""
        parts = sorted(self.parts.items(), key=lambda part: -part[1])
        return ", ".join(f"{name} {size / GB:.1f}" for name, size in parts if size >= GB / 20)


def plan(
    config: ModelConfig,
    recipe: Recipe,
    gpus: int = 1,
    memory_bytes: int | None = None,
    rates: DeviceRates | None = None,
    lengths: Sequence[int] | None = None,
) -> Plan:
    """Return the plan of a GRPO run. memory_bytes: of one GPU, or of the CPU. rates: of the GPU, for seconds per step.
    lengths: tokens sampled per sample, for the plan's tail; None: assumed."""
    setting = read_setting(recipe, gpus)
    needed, settled = _settled(config, setting, memory_bytes)
    checkpointed = settled.optim.checkpoint_activations == "on"
    fits = None if memory_bytes is None else needed.total <= memory_bytes
    largest = {} if memory_bytes is None else _largest(config, setting, memory_bytes)
    # The largest settings that more memory would not raise.
    bounds = {
        "optim.micro_batch_tokens": (max(setting.update_tokens, setting.length), "all that an update computes"),
        "rollout.max_context": (config.max_position_embeddings, "all positions of the model"),
    }
    return Plan(
        total_bytes=needed.total,
        parts=needed.phases[needed.peak],
        peak=needed.peak,
        phases=needed.phases,
        gpus=gpus,
        memory_bytes=memory_bytes,
        fits=fits,
        checkpointed=checkpointed,
        reference=settled.grpo.reference if setting.frozen_copy else None,
        host=needed.host,
        largest=largest,
        bounds={name: why for name, (bound, why) in bounds.items() if largest.get(name) == bound},
        advice=[] if memory_bytes is None or fits else _advice(config, setting, memory_bytes),
        seconds=None if rates is None else seconds_per_step(config, setting, rates, checkpointed),
        tail=None if rates is None else predicted_tail(config, setting, rates, lengths),
        links=None if rates is None else link_rate(rates, gpus),
    )


def _settled(config: ModelConfig, setting: PlanSetting, memory: int | None) -> tuple[Demand, PlanSetting]:
    """Return the demand and the setting without "auto": the first choice that fits, or the last if none does."""
    for choice in setting.choices():
        needed = demand(config, choice, memory, checkpointed=choice.optim.checkpoint_activations == "on")
        if memory is None or needed.total <= memory:
            break
    return needed, choice


def _fits(config: ModelConfig, setting: PlanSetting, memory: int) -> bool:
    return _settled(config, setting, memory)[0].total <= memory


def _largest(config: ModelConfig, setting: PlanSetting, memory: int) -> dict[str, int]:
    """Return the largest settings that fit, each with the others unchanged; settings that never fit are left out."""

    def fits(tokens: int) -> bool:
        return _fits(config, replace(setting, length=tokens, sampled=min(setting.sampled, tokens)), memory)

    found = {
        "optim.micro_batch_tokens": _micro_batch(config, setting, memory),
        "rollout.max_context": _last(fits, setting.rollout.kv_block_size, config.max_position_embeddings),
    }
    block = setting.rollout.kv_block_size
    context = -(-setting.length // block) * block
    least = max(context, setting.rollout.in_flight * block if setting.rollout.partial else 0)
    most = max(setting.rollout.max_num_seqs * context, least)  # more is never used
    wide = setting.changed("rollout.kv_tokens", most)
    if setting.cuda:  # a GPU's pool takes what is free, up to the wish
        pool = _settled(config, wide, memory)[0].phases["rollout"]["KV pool"]
        a_token = max(kv_bytes(config, setting.item), 1)  # a model without attention layers has no KV cache
        found["rollout.kv_tokens"] = pool // a_token - block if _fits(config, wide, memory) else None
    else:
        found["rollout.kv_tokens"] = _last(
            lambda tokens: _fits(config, setting.changed("rollout.kv_tokens", tokens), memory), least, most
        )
    return {name: value for name, value in found.items() if value is not None}


def _last(fits: Callable[[int], bool], lowest: int, highest: int) -> int | None:
    """Return the largest integer from `lowest` to `highest` that fits, by bisection; None if `lowest` does not fit."""
    if not fits(lowest):
        return None
    while lowest < highest:
        middle = (lowest + highest + 1) // 2
        lowest, highest = (middle, highest) if fits(middle) else (lowest, middle - 1)
    return lowest


def _advice(config: ModelConfig, setting: PlanSetting, memory: int) -> list[str]:
    """Return the changes that make it fit: each that suffices alone, or with a smaller micro-batch. If none does,
    combine switches until it fits."""
    known = switches(setting)

    def line(*changes: tuple[str, str]) -> str | None:
        changed = setting
        for key, value in changes:
            changed = changed.changed(key, value)
        return _line([f'{key} = "{value}"' for key, value in changes], config, changed, memory)

    tried = [line(), *(line(change) for change in known)]
    if setting.adapters is None and setting.grpo.reference != "cpu" and setting.optim.offload != "masters":
        tried.append(_line([f"[lora] with rank = {LORA[0]}"], config, replace(setting, adapters=LORA), memory))
    several = (line(*_combined(known[:count])) for count in range(2, len(known) + 1))
    lines = list(filter(None, tried)) or list(islice(filter(None, several), 1))
    if setting.cuda and setting.gpus == 1:
        lines += _sharded(config, setting, memory)
    return lines or ["no setting makes it fit: take a smaller model or a shorter rollout.max_context"]


def _combined(changes: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the changes without one that a later one of the same key replaces. Masters that are offloaded take the
    moments with them, so the moments' dtype saves nothing on the device then."""
    kept = dict(changes)
    if kept.get("optim.offload") == "masters":
        kept.pop("optim.optimizer_state_dtype", None)
    return list(kept.items())


def _micro_batch(config: ModelConfig, setting: PlanSetting, memory: int) -> int | None:
    """Return the largest micro-batch that fits, in tokens, between one context and all tokens of an update."""
    return _last(
        lambda tokens: _fits(config, setting.changed("optim.micro_batch_tokens", tokens), memory),
        setting.length,
        max(setting.update_tokens, setting.length),
    )


def _advised_tokens(config: ModelConfig, setting: PlanSetting, memory: int) -> int | None:
    tokens = _micro_batch(config, setting, memory)
    return None if tokens is None else max(tokens // ROUND * ROUND, setting.length)


def _sharded(config: ModelConfig, setting: PlanSetting, memory: int) -> list[str]:
    for gpus in range(2, MOST_GPUS + 1):
        rollout = setting.rollout
        if rollout.questions_per_step % (gpus * setting.grpo.updates_per_batch) or rollout.in_flight % gpus:
            continue  # a rank needs as many groups as the others
        shared = replace(setting, gpus=gpus)
        if _fits(config, shared, memory):
            return [f"sharded over {gpus} such GPUs it would fit (--gpus {gpus})"]
        if (tokens := _advised_tokens(config, shared, memory)) is not None:
            return [f"sharded over {gpus} such GPUs (--gpus {gpus}) optim.micro_batch_tokens = {tokens} would fit"]
    return []


def _line(words: list[str], config: ModelConfig, changed: PlanSetting, memory: int) -> str | None:
    if not _fits(config, changed, memory):
        tokens = _advised_tokens(config, changed, memory)
        if tokens is None:
            return None
        words.append(f"optim.micro_batch_tokens = {tokens}")
        changed = changed.changed("optim.micro_batch_tokens", tokens)
    total = _settled(config, changed, memory)[0].total
    return f"{' and '.join(words)} {'makes' if len(words) == 1 else 'make'} it fit: {total / GB:.1f} GB"


def check_memory(recipe: Recipe, folder: str | Path, ranks: int = 1, local: int = 1) -> tuple[Recipe, Plan]:
    """Return the recipe of a GRPO run from the model in `folder` without "auto" in its memory settings, and its plan.

    Print the changes made to fit, and a warning if it may not fit. On CUDA the plan must fit the free memory. A CPU's
    memory is shared, swapped and reclaimed, so there the plan must fit the total memory of the machine (or the
    container), with a warning if it exceeds what is available now. Raise UserError if it does not fit. ranks: number
    that share the states; local: number on this machine, which share its memory.
    """
    config = read_config(folder)
    total, available = (size // local for size in cpu_memory())
    there = f"there are {total / GB:.1f}"
    memory: int | None = total
    if recipe.model.device == "cuda":
        memory = int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else None
        there = f"the GPU has {(memory or 0) / GB:.1f} free"
    found = plan(config, recipe, ranks, memory_bytes=memory)
    if found.fits is False:
        raise UserError(
            f"the run needs {found.total_bytes / GB:.1f} GB at its {found.peak} ({found.sentence()}), and {there}; "
            f"{found.advice[0]} (thresher plan shows the rest)"
        )
    beside = sum(found.host.values()) if recipe.model.device == "cuda" else found.total_bytes
    if beside > available:
        console.print(
            f"train: the run may take {beside / GB:.1f} GB of memory, and {available / GB:.1f} are available now",
            soft_wrap=True,
        )
    optim = replace(recipe.optim, checkpoint_activations="on" if found.checkpointed else "off")
    grpo = recipe.grpo
    if found.reference is not None:
        grpo = replace(grpo, reference="cpu" if found.reference == "cpu" else "device")
    turned = []
    if recipe.optim.checkpoint_activations == "auto" and found.checkpointed:
        turned.append('optim.checkpoint_activations = "on"')
    if recipe.grpo.reference == "auto" and found.reference == "cpu":
        turned.append('grpo.reference = "cpu"')
    if turned:
        words = " and ".join(turned)
        console.print(
            f"train: the plan chooses {words}, because the run does not fit without it, and {there}", soft_wrap=True
        )
    return replace(recipe, optim=optim, grpo=grpo), found
