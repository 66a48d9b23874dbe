"""`thresher bench roofline`: floors and predictions of decode steps, updates and whole steps on absent GPUs.

Everything printed is arithmetic (engine/planning/time.py, tail.py): floors from data sheets, predictions from targets
and, for decoding, from constants fitted to an H200. No GPU is used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from thresher.bench.harness import append_rows, check_files, facts, print_files
from thresher.common.console import console
from thresher.common.errors import UserError
from thresher.engine.config.sections import GrpoSection, OptimSection, RolloutSection
from thresher.engine.planning import time as floors
from thresher.engine.planning.memory import BF16, PlanSetting, trained_weights
from thresher.engine.planning.tail import (
    Queue,
    RolloutCounts,
    predicted_rollout_s,
    tail_lengths,
    tokens_again,
    usual_rollouts,
)
from thresher.engine.planning.time import CHIPS, GB, Chip, DecodeShape, UpdateShape
from thresher.policy.config import FULL, LINEAR, DeltaShape, ModelConfig, read_config

SHARED, OWN, GROUP = 1200, 300, 8  # shared positions, positions of a sequence's own, sequences per group
LONGEST = 1000  # longest sample of a tail whose mean is OWN
STEP_QUESTIONS, STEP_PROMPT, STEP_SAMPLED = 8, 1000, 256  # of `bench step` on a GPU, with GROUP samples per question
IN_FLIGHT = (1, 2, 3, 5)  # groups started and not yet trained on / groups of a step; more than 1 with rollout.partial

# The sizes of the Qwen2.5 models, from their published config.json files: layers, width, heads, key/value heads, width
# of the MLP, rows of the head, whether the head is tied to the embedding.
SIZES = {
    "0.5B": (24, 896, 14, 2, 4864, 151_936, True),
    "1.5B": (28, 1536, 12, 2, 8960, 151_936, True),
    "3B": (36, 2048, 16, 2, 11_008, 151_936, True),
    "7B": (28, 3584, 28, 4, 18_944, 152_064, False),
}
MODELS = {
    name: ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=32_768,
        tie_word_embeddings=tied,
        eos_token_ids=(),
    )
    for name, (layers, hidden, heads, kv_heads, intermediate, vocab, tied) in SIZES.items()
}

# Likewise for Qwen3.5's dense models, with the value heads of the layers with the gated delta rule; three of these for
# each attention layer, with heads of 256.
QWEN35_SIZES = {
    "Qwen3.5-0.8B": (24, 1024, 8, 2, 3584, 16, True),
    "Qwen3.5-2B": (24, 2048, 8, 2, 6144, 16, True),
    "Qwen3.5-4B": (32, 2560, 16, 4, 9216, 32, True),
    "Qwen3.5-9B": (32, 4096, 16, 4, 12_288, 32, False),
    "Qwen3.5-27B": (64, 5120, 24, 4, 17_408, 48, False),
}
QWEN35 = {
    name: ModelConfig(
        model_type="qwen3_5_text",
        vocab_size=248_320,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=256,
        rms_norm_eps=1e-6,
        rope_theta=1e7,
        partial_rotary_factor=0.25,
        layer_types=(*3 * (LINEAR,), FULL) * (layers // 4),
        delta=DeltaShape(16, value_heads, 128, 128, 4),
        max_position_embeddings=262_144,
        tie_word_embeddings=tied,
        eos_token_ids=(),
    )
    for name, (layers, hidden, heads, kv_heads, intermediate, value_heads, tied) in QWEN35_SIZES.items()
}


def config_of(name: str) -> ModelConfig:
    """Return a size's config. KeyError for an unknown name."""
    return (MODELS | QWEN35)[name]


def check_batch(batch: int) -> None:
    """Raise UserError for a number of sequences that is not divisible into groups."""
    if batch % GROUP:
        raise UserError(f"--batch {batch}: expected a multiple of {GROUP}, because one shape has groups of {GROUP}")


def run_roofline(
    chips: Sequence[str],
    models: Sequence[str],
    batch: int,
    sigmas: Sequence[float],
    prompt: int,
    out: str | Path | None,
) -> list[dict[str, Any]]:
    """Print the tables for these chips and models (a name of `MODELS` or a model folder), and append rows to `out`.
    sigmas: of the lognormal lengths of rollouts; prompt: the tokens that a group shares there. Returns the rows.
    """
    configs = {name: _config(name) for name in models}
    check_batch(batch)
    check_files(out, None)
    counts = {sigma: counts_of_tail(sigma, batch) for sigma in sigmas}
    rows = [
        row
        for chip in (CHIPS[name] for name in chips)
        for name, config in configs.items()
        for row in (
            *_decode_rows(chip, name, config, batch),
            *(_rollout_row(chip, name, config, batch, prompt, sigma, counts[sigma]) for sigma in sigmas),
            _update_row(chip, name, config, batch),
            _step_row(chip, name, config),
        )
    ]
    console.print("predictions: data sheets, aims, an H200's constants; nothing is measured here")
    console.print(f"decode, batch {batch}, bfloat16: the floor of a step, the predicted share of it, tokens/s")
    _show([_decode_cells(row) for row in rows if row["kind"] == "decode"])
    console.print(
        f"a rollout of {batch} samples in as many slots, {OWN} tokens on average, a tail to {LONGEST:,}, prompts of "
        f"{prompt:,}; xN: times as fast by rollout.partial with N times a step's groups in flight/with stale_cache too"
    )
    _show([_rollout_cells(row) for row in rows if row["kind"] == "rollout"])
    _show([_count_cells(sigma, times, prompt, found) for sigma in sigmas for times, found in counts[sigma].items()])
    console.print(f"an update of {batch} x 1,500 tokens, 300 of them sampled: ms per 1,000 tokens")
    _show([_update_cells(row) for row in rows if row["kind"] == "update"])
    console.print(
        f"step, {step_tokens():,} tokens, as in gpu-check: {STEP_QUESTIONS} prompts of {STEP_PROMPT:,} tokens, {GROUP} "
        f"samples of {STEP_SAMPLED} each; seconds of rollout and update, and of an update without shared prefixes"
    )
    _show([_step_cells(row) for row in rows if row["kind"] == "step"])
    console.print("states: of full fine-tuning, without activations; !: more than the chip's memory")
    head = {"bench": "roofline", **facts()} if out is not None else {}
    append_rows(out, *(head | row for row in rows))
    print_files(out)
    return rows


def _config(name: str) -> ModelConfig:
    if name in MODELS | QWEN35:
        return config_of(name)
    if not Path(name).is_dir():
        known = ", ".join(MODELS | QWEN35)
        raise UserError(f"--model {name}: expected one of {known}, or a model folder with config.json")
    return read_config(name)


def _decode_rows(chip: Chip, name: str, config: ModelConfig, batch: int) -> list[dict[str, Any]]:
    rows = []
    shapes = (DecodeShape(batch=batch), DecodeShape(batch=batch, group=GROUP, shared=SHARED, own=OWN))
    for shape in shapes:
        costs = floors.decode_costs(config, shape)
        seconds, expected = floors.floor_s(costs, chip), floors.predicted_decode_s(config, shape, chip)
        memory = floors.decode_bytes(config, shape)
        rows.append(
            {
                "kind": "decode",
                "chip": chip.name,
                "model": name,
                "shape": asdict(shape),
                "parts": [asdict(cost) | {"seconds": cost.seconds(chip)} for cost in costs],
                "floor_seconds": seconds,
                "floor_tokens_per_s": batch / seconds,
                "predicted_share": seconds / expected,
                "predicted_tokens_per_s": batch / expected,
                "memory_gb": memory / GB,
                "fits": memory < chip.memory,
            }
        )
    return rows


def counts_of_tail(sigma: float, batch: int) -> dict[int, RolloutCounts]:
    """Return the counts of rollouts of `batch` samples in as many slots, for each of IN_FLIGHT."""
    lengths, groups = tail_lengths(OWN, LONGEST, sigma), batch // GROUP
    return {times: usual_rollouts(lengths, Queue(GROUP, groups, times * groups, batch)) for times in IN_FLIGHT}


def _rollout_row(
    chip: Chip,
    name: str,
    config: ModelConfig,
    batch: int,
    prompt: int,
    sigma: float,
    counts: Mapping[int, RolloutCounts],
) -> dict[str, Any]:
    seconds = {times: predicted_rollout_s(config, found, prompt, chip) for times, found in counts.items()}
    kept = {
        times: predicted_rollout_s(config, found, prompt, chip, stale_cache=True) for times, found in counts.items()
    }
    return {
        "kind": "rollout",
        "chip": chip.name,
        "model": name,
        "shape": {
            "samples": batch,
            "group": GROUP,
            "shared": prompt,
            "mean": OWN,
            "longest": LONGEST,
            "sigma": sigma,
        },
        "mean_batch": counts[1].mean_busy,
        "predicted_seconds": seconds[1],
        "predicted_tokens_per_s": counts[1].drawn / counts[1].steps / seconds[1],
        "partial": [
            {
                "in_flight": times * batch // GROUP,
                "mean_batch": found.mean_busy,
                "staleness": found.mean_staleness,
                "max_staleness": max(found.staleness),
                "tokens_again": tokens_again(found, prompt) / found.steps,
                "predicted_speedup": seconds[1] / seconds[times],
                "predicted_speedup_stale_cache": seconds[1] / kept[times],
            }
            for times, found in counts.items()
            if times > 1
        ],
    }


def _update_row(chip: Chip, name: str, config: ModelConfig, batch: int) -> dict[str, Any]:
    shape = UpdateShape(trajectories=batch)
    costs = floors.update_costs(config, shape)
    states = floors.state_bytes(config)
    return {
        "kind": "update",
        "chip": chip.name,
        "model": name,
        # without options of runs: a row's update keeps its activations, and its objective is of single tokens
        "shape": {name: value for name, value in asdict(shape).items() if name not in ("checkpointed", "head_first")},
        "weights": trained_weights(config),
        "parts_of_a_token": [asdict(cost) | {"seconds": cost.seconds(chip)} for cost in costs],
        "floor_seconds_per_1000_tokens": 1000 * floors.floor_s(costs, chip),
        "predicted_seconds_per_1000_tokens": 1000 * floors.predicted_update_s(costs, chip),
        "predicted_mfu": floors.predicted_mfu(costs, chip),
        "states_gb": states / GB,
        "states_fit": states < chip.memory,
    }


def step_tokens() -> int:
    """Return the tokens of a step's trajectories, with the prompt counted for every sample."""
    return STEP_QUESTIONS * GROUP * (STEP_PROMPT + STEP_SAMPLED)


def predicted_step(config: ModelConfig, chip: Chip) -> dict[str, float]:
    """Return the predicted seconds of a step of `bench step` that trains all weights, by the formulas of `plan`:
    {"rollout", "update", "unshared"}, the last of an update without shared prefixes."""

    def seconds(share_prefix: bool) -> dict[str, float]:
        setting = PlanSetting(
            rollout=RolloutSection(group_size=GROUP, questions_per_step=STEP_QUESTIONS),
            optim=OptimSection(share_prefix=share_prefix),
            grpo=GrpoSection(),
            cuda=True,
            item=BF16,
            adapters=None,
            length=STEP_PROMPT + STEP_SAMPLED,
            sampled=STEP_SAMPLED,
            searched=0,
            steps=1,
            gpus=1,
        )
        return floors.seconds_per_step(config, setting, chip, checkpointed=False)

    return seconds(share_prefix=True) | {"unshared": seconds(share_prefix=False)["update"]}


def _step_row(chip: Chip, name: str, config: ModelConfig) -> dict[str, Any]:
    seconds = predicted_step(config, chip)
    return {
        "kind": "step",
        "chip": chip.name,
        "model": name,
        "shape": {
            "questions": STEP_QUESTIONS,
            "group": GROUP,
            "prompt": STEP_PROMPT,
            "sampled": STEP_SAMPLED,
        },
        "predicted_seconds": seconds,
        "predicted_tokens_per_s": step_tokens() / (seconds["rollout"] + seconds["update"]),
    }


def context_text(shape: DecodeShape) -> str:
    """Return the context of a decode step as tables name it: shared positions / sequences + own positions."""
    return f"{shape.shared:,}/{shape.group} + {shape.own:,}" if shape.shared else f"{shape.own:,}"


def _decode_cells(row: dict[str, Any]) -> dict[str, str]:
    return {
        "chip": row["chip"],
        "model": row["model"],
        "context": context_text(DecodeShape(**row["shape"])),
        "GB": f"{row['memory_gb']:.0f}" + ("" if row["fits"] else " !"),
        "ms": f"{1000 * row['floor_seconds']:.2f}",
        "tokens/s": f"{row['floor_tokens_per_s'] / 1000:.1f}k",
        "share": f"{row['predicted_share']:.0%}",
        "predicted": f"{row['predicted_tokens_per_s'] / 1000:.1f}k",
    }


def _rollout_cells(row: dict[str, Any]) -> dict[str, str]:
    faster = {
        f"x{times}": f"{one['predicted_speedup']:.2f}/{one['predicted_speedup_stale_cache']:.2f}"
        for times, one in zip(IN_FLIGHT[1:], row["partial"], strict=True)
    }
    return {
        "chip": row["chip"],
        "model": row["model"],
        "sigma": f"{row['shape']['sigma']:g}",
        "s": f"{row['predicted_seconds']:.1f}",
        "tokens/s": f"{row['predicted_tokens_per_s'] / 1000:.1f}k",
        **faster,
    }


def _count_cells(sigma: float, times: int, prompt: int, counts: RolloutCounts) -> dict[str, str]:
    return {
        "sigma": f"{sigma:g}",
        "": f"x{times}",
        "decode steps": f"{counts.decode_steps / counts.steps:.0f}",
        "busy slots": f"{counts.mean_busy:.0f}",
        "staleness": f"{counts.mean_staleness:.2f}",
        "at most": f"{max(counts.staleness)}",
        "prefilled again": f"{tokens_again(counts, prompt) / counts.steps / 1000:.0f}k",
    }


def _update_cells(row: dict[str, Any]) -> dict[str, str]:
    return {
        "chip": row["chip"],
        "model": row["model"],
        "states, GB": f"{row['states_gb']:.0f}" + ("" if row["states_fit"] else " !"),
        "floor, ms": f"{1000 * row['floor_seconds_per_1000_tokens']:.1f}",
        "predicted, ms": f"{1000 * row['predicted_seconds_per_1000_tokens']:.1f}",
        "MFU": f"{row['predicted_mfu']:.0%}",
    }


def _step_cells(row: dict[str, Any]) -> dict[str, str]:
    seconds = row["predicted_seconds"]
    return {
        "chip": row["chip"],
        "model": row["model"],
        "tokens/s": f"{row['predicted_tokens_per_s'] / 1000:.1f}k",
        "rollout": f"{seconds['rollout']:.2f}",
        "update": f"{seconds['update']:.2f}",
        "unshared": f"{seconds['unshared']:.2f}",
        "shared / unshared": f"{seconds['unshared'] / seconds['update']:.2f}x",
    }


def _show(rows: Sequence[dict[str, str]]) -> None:
    drawn = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for number, name in enumerate(rows[0]):
        drawn.add_column(name, justify="left" if number < 2 else "right", overflow="fold", no_wrap=number > 1)
    for row in rows:
        drawn.add_row(*row.values())
    console.print(drawn)
