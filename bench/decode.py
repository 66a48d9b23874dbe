"""`thresher bench decode`: decode steps of Qwen2.5's and Qwen3.5's sizes with random weights, by the rollout's decoder.

Each sequence of a batch has a cached context, either its own or one of which a group of 8 shares 1,200 of 1,500
positions; then every step samples a token for each. Keys and values of the contexts are random numbers: a step takes
the same time, and computing them would take 6.8 PFLOP at 7B. No sequence ends, so every step has the whole batch. A row
has the time of a step, the host's part of it and, on a known chip, the share of the floor and of the prediction. A
shape that does not fit into the device's memory is left out, with a sentence.
"""

import gc
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from thresher.bench.harness import (
    append_rows,
    check_files,
    dtype_name,
    facts,
    profile_kernels,
    resolve_device,
    resolve_dtype,
    spread,
)
from thresher.bench.roofline import GROUP, OWN, SHARED, check_batch, config_of
from thresher.common.console import console, table
from thresher.common.errors import UserError
from thresher.engine.decoding.decoder import DecodeClock, Decoder
from thresher.engine.decoding.decoder_cuda import KV_SHARE, free_memory, make_decoder
from thresher.engine.decoding.kv_cache import PagedKV
from thresher.engine.decoding.scheduler import SamplingParams, SharedPrompt, TokenSequence
from thresher.engine.planning.time import DecodeShape, decode_costs, floor_s, predicted_decode_s, this_chip
from thresher.kernels.attention.backends.choice import resolve_attention
from thresher.policy.config import ModelConfig
from thresher.policy.model import Policy

PAGE = 64
WARMUP = 4  # untimed steps; the first capture graphs
UNDRAWN = 271  # columns of a padded head without a token in Qwen2.5's tokenizer
SPREAD = 0.5  # standard deviation of the contexts' keys and values
PROFILED = 8  # steps


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBench:
    """Options. models: names of bench/roofline.py. own, shared: positions of a context; shapes of both kinds are
    measured. budget: seconds, after which no shape starts. profile: file for the kernel times of PROFILED more steps of
    each shape."""

    models: Sequence[str] = ("0.5B", "1.5B", "7B")
    batch: int = 256
    own: int = OWN
    shared: int = SHARED
    steps: int = 64
    device: str | None = None
    dtype: str | None = None
    budget: float = float("inf")
    profile: str | None = None

    def shapes(self) -> tuple[DecodeShape, ...]:
        return (
            DecodeShape(batch=self.batch, group=1, shared=0, own=self.shared + self.own),
            DecodeShape(batch=self.batch, group=GROUP, shared=self.shared, own=self.own),
        )


@dataclass(frozen=True, slots=True)
class Columns:
    """The part of a tokenizer that a decoder needs without stop strings."""

    vocab_size: int


def run_decode_bench(bench: DecodeBench, out: str | Path | None = None) -> list[dict[str, Any]]:
    """Measure, append the rows to `out` as they are made, print a table; return the rows."""
    check_batch(bench.batch)
    device = resolve_device(bench.device)
    dtype = resolve_dtype(bench.dtype, device)
    check_files(out, None, bench.profile)
    head, deadline = {"bench": "decode", **facts(("triton",))}, time.monotonic() + bench.budget
    rows: list[dict[str, Any]] = []
    for name in bench.models:
        policy: Policy | None = None
        for shape in bench.shapes():
            try:
                if time.monotonic() > deadline:
                    raise UserError("the budget was used up")
                _free(device)
                policy = policy or random_policy(config_of(name), device, dtype)
                figures = measure(policy, shape, bench.steps, bench.profile)
            except (UserError, torch.OutOfMemoryError) as error:
                why = "out of memory" if isinstance(error, torch.OutOfMemoryError) else str(error)
                console.print(f"{name}, {_context(shape)}: left out, {why}", soft_wrap=True)
                continue
            row = head | {"model": name, "device": device.type, "dtype": dtype_name(dtype)} | figures
            append_rows(out, row)
            rows.append(row)
    _show(rows)
    return rows


def _free(device: torch.device) -> None:
    """Return unused cached memory to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def random_policy(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Policy:
    """Make a policy with normally distributed weights, on the device."""
    with torch.device("meta"):
        policy = Policy(config)
    policy = policy.to(dtype).to_empty(device=device).requires_grad_(False)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.02)
            else:
                parameter.fill_(1.0 if parameter.shape[0] == config.hidden_size else 0.0)
    return policy


def measure(policy: Policy, shape: DecodeShape, steps: int, profile: str | None = None) -> dict[str, Any]:
    """Return a shape's figures: seconds of a step, and of the host's part. UserError if it does not fit."""
    decoder, attention = _filled(policy, shape, WARMUP + steps + PROFILED + 2)
    for _ in range(WARMUP):
        decoder.step()
    # On a GPU a call launches a step and reads the previous one. Without a wait here, each call takes one step's time.
    host, times = decoder.clock.host, []
    for _ in range(steps):
        started = time.perf_counter()
        decoder.step()
        times.append(time.perf_counter() - started)
    host_s, seconds = (decoder.clock.host - host) / steps, sum(times) / steps
    if profile is not None:
        title = f"{policy.config.num_hidden_layers} layers, {_context(shape)}, {PROFILED} steps"
        profile_kernels(lambda: [decoder.step() for _ in range(PROFILED)], policy.device, profile, title)
    chip = this_chip(policy.device) if policy.dtype == torch.bfloat16 else None  # a data sheet's rates are bfloat16's
    floor = expected = None
    if chip is not None:
        floor = floor_s(decode_costs(policy.config, shape), chip)
        expected = predicted_decode_s(policy.config, shape, chip)
    return {
        "shape": asdict(shape),
        "attention": attention,
        "steps": steps,
        "step_s": spread(times),
        "mean_step_s": seconds,
        "tokens_per_s": shape.batch / seconds,
        "host_s": host_s,
        "chip": None if chip is None else chip.name,
        "floor_s": floor,
        "floor_share": None if floor is None else floor / seconds,
        "predicted_share": None if floor is None or expected is None else floor / expected,
    }


def _filled(policy: Policy, shape: DecodeShape, room: int) -> tuple[Decoder, str]:
    """Return a decoder with the whole batch in the middle of its turns, and its attention. UserError if it does not
    fit."""
    config, rng = policy.config, Random(0)
    columns = max(config.vocab_size - UNDRAWN, 1)
    device, dtype = policy.device, policy.dtype
    attention = resolve_attention("auto", device, dtype, config.head_dim, "rollout")
    longest, in_common = shape.context + 1 + room, shape.shared // PAGE
    # One block per sequence stays free, as the scheduler requires.
    blocks = shape.batch // shape.group * in_common + shape.batch * (-(-longest // PAGE) - in_common + 1)
    needed, free = PagedKV.bytes_needed(config, 1 + blocks, PAGE, dtype.itemsize), KV_SHARE * free_memory(device)
    if needed > free:
        raise UserError(
            f"its keys and values take {needed / 1e9:.1f} GB, but only {free / 1e9:.1f} GB are free for them"
        )
    options = {"num_blocks": 1 + blocks, "block_size": PAGE, "max_running": shape.batch}
    decoder = make_decoder(policy, Columns(columns), attention, **options)  # type: ignore[arg-type]
    decoder.begin(longest, DecodeClock())

    def ids(count: int) -> list[int]:
        return [rng.randrange(columns) for _ in range(count)]

    for group in range(shape.batch // shape.group):
        prompt = SharedPrompt(ids(shape.shared) or ids(shape.own))
        for member in range(shape.group):
            own = ids(shape.own) if shape.shared else []
            # The last token is a sampled one, which the first step feeds.
            whole = prompt.ids + own + ids(1)
            sequence = TokenSequence(prompt, group * shape.group + member, SamplingParams(), whole)
            decoder.begin_turn(sequence, (), room)
    _fill_contexts(decoder)
    return decoder, attention


def _fill_contexts(decoder: Decoder) -> None:
    """Admit the waiting sequences with random keys and values, as if all but their last tokens had been computed."""
    for cached in decoder.held():
        for layer in cached:
            layer.normal_(0.0, SPREAD)
    batch, scheduler = decoder.batch, decoder.scheduler
    prompts: set[int] = set()
    turns: tuple[list[TokenSequence], list[TokenSequence]] = [], list(scheduler.waiting)
    if decoder.has_states:  # a prefix is shared after the states at its end are kept: one sequence per group first
        turns = [], []
        for sequence in scheduler.waiting:
            turns[id(sequence.prompt) in prompts].append(sequence)
            prompts.add(id(sequence.prompt))
    for number, waiting in enumerate(turns):
        scheduler.waiting = waiting
        while scheduler.waiting:
            decoder._admit()
            if not decoder._prefilling:
                raise UserError(f"{len(scheduler.waiting)} sequences do not fit into the cache")
            for sequence in decoder._prefilling:
                batch.cached_B[sequence.slot] = batch.known_B[sequence.slot] - 1
                decoder._mark_ready(sequence)  # the rest of its group has the same prefix
                if number == 0:
                    ids = sequence.prompt.ids
                    decoder._keep_states(sequence, ids[: len(ids) // PAGE * PAGE])
            decoder._prefilling = []


def _context(shape: DecodeShape) -> str:
    return f"{shape.shared:,} shared by {shape.group} + {shape.own:,}" if shape.shared else f"{shape.own:,}"


def _show(rows: Sequence[dict[str, Any]]) -> None:
    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.0%}"

    table(
        "decode steps",
        ("model", "batch", "context", "ms", "host ms", "tokens/s", "of floor", "predicted"),
        [
            (
                row["model"],
                f"{row['shape']['batch']:,}",
                _context(DecodeShape(**row["shape"])),
                f"{1e3 * row['mean_step_s']:.2f}",
                f"{1e3 * row['host_s']:.2f}",
                f"{row['tokens_per_s']:,.0f}",
                share(row["floor_share"]),
                share(row["predicted_share"]),
            )
            for row in rows
        ],
    )
