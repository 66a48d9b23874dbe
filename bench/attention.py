"""`thresher bench attention`: a layer's training attention over groups with a shared prompt, compared with peers.

The batch is a forest: each tree is a prompt and the samples of its group, with each position once
(kernels/attention/prefix.py). Forward and backward are timed together, in turn. Before that, output and gradients are
compared with torch's products in float32; for `unshared` only the output is. A contender that cannot run, fails or is
wrong gets a reason in place of figures.

    ours       one kernel forward and two backward over the whole forest (forest_triton.py); in parts on a CPU
    parts      a segment's own attention and that to each ancestor, by torch's flash attention, merged
    flex       torch.nn.attention.flex_attention, compiled with its defaults, with the same mask as blocks
    unshared   every trajectory whole, with a copy of its prompt, by the library that training uses

    floor      14 x D x N operations per visible pair of positions: two products forward, five backward
    layout     ms of the structures built once per forward for all layers (lists, parts, blocks of the mask), as the
               additional time of a call that builds them

Axes: T packed tokens, N query heads, K key/value heads, D head dimension.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thresher.bench.harness import (
    append_rows,
    check_files,
    dtype_name,
    facts,
    in_turn,
    milliseconds,
    ratios,
    reason_of,
    resolve_device,
    resolve_dtype,
    spread,
    spread_text,
)
from thresher.bench.roofline import GROUP, MODELS, OWN, SHARED
from thresher.common.console import console, table
from thresher.engine.planning.time import this_chip
from thresher.kernels.attention.backends.choice import load_attention, resolve_attention
from thresher.kernels.attention.backends.parts import load_forest_attention, load_partial_attention
from thresher.kernels.attention.parts import MatmulAttention
from thresher.kernels.attention.prefix import PrefixForest, prefix_attention
from thresher.kernels.attention.varlen import Varlen
from thresher.policy.config import ModelConfig

OURS, UNSHARED = "ours", "unshared"
WARMUP = 3  # untimed calls
LARGEST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 1e-2}  # relative to the norm of an output or a gradient
CUDA_ONLY = "It runs on CUDA only."

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBench:
    """Options. models: names of MODELS, for the heads. trees: prompts, each with `group` samples. shared, own: tokens
    of a prompt and of a sample. rounds: timed calls of each. budget: seconds, after which no further model starts."""

    models: Sequence[str] = ("0.5B", "1.5B", "7B")
    trees: int = 8
    group: int = GROUP
    shared: int = SHARED
    own: int = OWN
    rounds: int = 20
    device: str | None = None
    dtype: str | None = None
    budget: float = float("inf")


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs of all contenders: leaves q [T, N, D], k and v [T, K, D], and the output's gradient [T, N, D]."""

    bench: AttentionBench
    leaves: tuple[Tensor, Tensor, Tensor]
    grad_TND: Tensor
    lengths: list[int]
    parents: list[int]

    @property
    def device(self) -> torch.device:
        return self.grad_TND.device

    @property
    def pairs(self) -> int:
        """Return the number of (row, visible key) pairs."""
        bench = self.bench
        inner = bench.shared * (bench.shared + 1) + bench.group * bench.own * (2 * bench.shared + bench.own + 1)
        return bench.trees * inner // 2

    def forest(self, attention: Any) -> PrefixForest:
        return PrefixForest(self.lengths, self.parents, self.device, attention)

    def paths_t(self) -> Tensor:
        """Return the row of each position of each trajectory, concatenated: shared positions are repeated."""
        bench, whole = self.bench, self.bench.shared + self.bench.group * self.bench.own
        rows = [
            chain(range(bench.shared), range(start, start + bench.own))
            for start in range(bench.shared, whole, bench.own)
        ]
        one_tree = torch.tensor(list(chain.from_iterable(rows)), device=self.device)
        return (one_tree + whole * torch.arange(bench.trees, device=self.device)[:, None]).flatten()


@dataclass(slots=True)
class Contender:
    """A contender. prepare(batch) returns a function that builds the layout and returns the attention over `leaves`."""

    name: str
    prepare: Callable[[Batch], Callable[[], Attend]]
    run: Callable[[], list[Tensor]] | None = None
    why: str | None = None
    layout_ms: float | None = None
    error: float | None = None


def _ours(batch: Batch) -> Callable[[], Attend]:
    q_TND = batch.leaves[0]
    backend = resolve_attention("auto", batch.device, q_TND.dtype, q_TND.shape[-1], "training")
    return _over_forest(batch, load_forest_attention(backend, batch.device, q_TND.dtype, q_TND.shape[-1]))


def _parts(batch: Batch) -> Callable[[], Attend]:
    q_TND = batch.leaves[0]
    return _over_forest(batch, load_partial_attention("varlen", batch.device, q_TND.dtype, q_TND.shape[-1]))


def _over_forest(batch: Batch, attention: Any) -> Callable[[], Attend]:
    def layout() -> Attend:
        forest = batch.forest(attention)
        return lambda q_TND, k_TKD, v_TKD: prefix_attention(q_TND, k_TKD, v_TKD, forest)

    return layout


def _flex(batch: Batch) -> Callable[[], Attend]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    attend, blocks = torch.compile(flex_attention), torch.compile(create_block_mask)
    T, end_T = len(batch.grad_TND), batch.forest(None).end_T.to(torch.int32)

    def seen(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key <= row) & (row < end_T[key])

    def layout() -> Attend:
        mask = blocks(seen, None, None, T, T, device=batch.device.type)

        def run(*qkv: Tensor) -> Tensor:
            q, k, v = (x.transpose(0, 1)[None] for x in qkv)
            out_BNTD: Tensor = attend(q, k, v, block_mask=mask, enable_gqa=True)
            return out_BNTD[0].transpose(0, 1)

        return run

    return layout


def _unshared(batch: Batch) -> Callable[[], Attend]:
    """Prepare the attention over leaves of whole trajectories."""
    bench, q_TND = batch.bench, batch.leaves[0]
    attention = load_attention(resolve_attention("auto", batch.device, q_TND.dtype, q_TND.shape[-1], "training"))

    def layout() -> Attend:
        varlen = Varlen([bench.shared + bench.own] * (bench.trees * bench.group), batch.device, attention)
        return lambda q_tND, k_tKD, v_tKD: attention(q_tND, k_tKD, v_tKD, varlen)

    return layout


def contenders(device: torch.device) -> list[Contender]:
    """Return all contenders, ours first."""
    peers = [Contender("parts", _parts), Contender("flex", _flex)]
    if device.type != "cuda":
        for peer in peers:
            peer.why = CUDA_ONLY
    return [Contender(OURS, _ours), *peers, Contender(UNSHARED, _unshared)]


def make_batch(bench: AttentionBench, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Batch:
    """Draw the inputs as views of one projection, as in a layer."""
    lengths = [bench.shared, *[bench.own] * bench.group] * bench.trees
    parents = [parent for tree in range(bench.trees) for parent in (-1, *[tree * (bench.group + 1)] * bench.group)]
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    noise = torch.Generator(device).manual_seed(0)
    qkv_TMD = torch.randn(sum(lengths), heads + 2 * kv_heads, dim, device=device, generator=noise).to(dtype)
    grad_TND = torch.randn(sum(lengths), heads, dim, device=device, generator=noise).to(dtype)
    q_TND, k_TKD, v_TKD = (x.requires_grad_() for x in qkv_TMD.split([heads, kv_heads, kv_heads], 1))
    return Batch(bench, (q_TND, k_TKD, v_TKD), grad_TND, lengths, parents)


def whole_trajectories(batch: Batch) -> Batch:
    """Return leaves and gradient with every prompt copied to each of its samples; forest and pairs are the batch's."""
    paths_t = batch.paths_t()
    q_tND, k_tKD, v_tKD = (leaf.detach()[paths_t].requires_grad_() for leaf in batch.leaves)
    return Batch(batch.bench, (q_tND, k_tKD, v_tKD), batch.grad_TND[paths_t], batch.lengths, batch.parents)


def once(attend: Attend, batch: Batch) -> list[Tensor]:
    """Return the output and the gradients of q, k and v."""
    out_TND = attend(*batch.leaves)
    return [out_TND.detach(), *torch.autograd.grad(out_TND, batch.leaves, batch.grad_TND)]


def _from_layout(layout: Callable[[], Attend], batch: Batch) -> list[Tensor]:
    return once(layout(), batch)


def error_of(found: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Return the largest error, relative to the norm of the correct tensor."""
    return max(float((got.float() - truth).norm() / truth.norm()) for got, truth in zip(found, right, strict=True))


def try_contender(rival: Contender, batch: Batch, right: Sequence[Tensor]) -> None:
    """Set the contender's call, its error and its layout time, or the reason for having none. right: the output and
    gradients in float32."""
    limit = LARGEST_ERROR[batch.grad_TND.dtype]
    truth = list(right)
    try:
        if rival.name == UNSHARED:
            # A prompt's gradients are sums over its copies, which are not summed here, so only its output is compared.
            truth, batch = [right[0][batch.paths_t()]], whole_trajectories(batch)
        layout = rival.prepare(batch)
        attend = layout()
        rival.error = error_of(once(attend, batch)[: len(truth)], truth)  # also compiles
        if not rival.error <= limit:
            rival.why = f"It is wrong by {rival.error:.1e}."
            return
        run = partial(once, attend, batch)
        kept = min(milliseconds(run, batch.device) for _ in range(WARMUP))
        # The forest's lists are built by the first layer that needs them, so a whole call is timed.
        fresh = min(milliseconds(partial(_from_layout, layout, batch), batch.device) for _ in range(WARMUP))
        rival.layout_ms = max(fresh - kept, 0.0)
        rival.run = run
    except Exception as error:  # libraries and compilers raise any kind of error
        rival.why = reason_of(error)


def measure(bench: AttentionBench, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Row:
    """Return the figures for one model's heads."""
    batch = make_batch(bench, config, device, dtype)
    single = [x.detach().float().requires_grad_() for x in batch.leaves]
    exact = Batch(bench, (single[0], single[1], single[2]), batch.grad_TND.float(), batch.lengths, batch.parents)
    right = once(_over_forest(exact, MatmulAttention())(), exact)
    rivals = contenders(device)
    for rival in rivals:
        if rival.why is None:
            try_contender(rival, batch, right)
    del right, exact, single
    calls = {rival.name: rival.run for rival in rivals if rival.run is not None}
    times = dict(zip(calls, in_turn(list(calls.values()), bench.rounds, device, lambda: None), strict=True))
    chip = this_chip(device)
    operations = 14 * config.head_dim * config.num_attention_heads * batch.pairs
    floor_ms = None if chip is None or dtype != torch.bfloat16 else 1e3 * operations / chip.flops_per_s
    return {
        "rounds": bench.rounds,
        "attention": resolve_attention("auto", device, dtype, config.head_dim, "training"),
        "tokens": len(batch.grad_TND),
        "unshared_tokens": bench.trees * bench.group * (bench.shared + bench.own),
        "pairs": batch.pairs,
        "floor_ms": floor_ms,
        "sides": {
            rival.name: {
                "ms": spread(times[rival.name]) if rival.name in times else None,
                "layout_ms": rival.layout_ms,
                "error": rival.error,
                "left_out": rival.why,
            }
            for rival in rivals
        },
        "ratio": {name: ratios(spent, times[OURS]) for name, spent in times.items() if OURS in times and name != OURS},
    }


def run_attention_bench(bench: AttentionBench, out: str | Path | None = None) -> list[Row]:
    """Measure each model's heads, append rows to `out`, print a table; return the rows."""
    device = resolve_device(bench.device)
    dtype = resolve_dtype(bench.dtype, device)
    check_files(out, None)
    head, deadline, rows = {"bench": "attention", **facts(("triton",))}, time.monotonic() + bench.budget, list[Row]()
    for name in bench.models:
        if time.monotonic() > deadline:
            console.print(f"{name}: left out, the budget was used up", soft_wrap=True)
            continue
        config = MODELS[name]
        shape = {"trees": bench.trees, "group": bench.group, "shared": bench.shared, "own": bench.own}
        shape |= {"heads": config.num_attention_heads, "kv_heads": config.num_key_value_heads, "dim": config.head_dim}
        row = head | {"model": name, "device": device.type, "dtype": dtype_name(dtype), "shape": shape}
        row |= measure(bench, config, device, dtype)
        append_rows(out, row)
        rows.append(row)
    show(rows)
    return rows


def show(rows: Sequence[Row]) -> None:
    """Print a line for each model and contender, and the reason if a contender has no figures."""
    table(
        "attention of a layer, forward and backward",
        ("heads of", "tokens", "", "ms", "/ ours", "of floor", "layout ms"),
        [
            (
                row["model"],
                f"{row['unshared_tokens' if name == UNSHARED else 'tokens']:,}",
                name,
                spread_text(side["ms"]),
                f"{row['ratio'][name]['p50']:.2f}" if name in row["ratio"] else "-",
                f"{row['floor_ms'] / side['ms']['p50']:.0%}" if row["floor_ms"] and name != UNSHARED else "-",
                f"{side['layout_ms']:.2f}",
            )
            for row in rows
            for name, side in row["sides"].items()
            if side["left_out"] is None
        ],
    )
    for row in rows:
        for name, side in row["sides"].items():
            if side["left_out"] is not None:
                console.print(f"{row['model']}, {name}: {side['left_out']}", soft_wrap=True)


def failure(rows: Sequence[Row]) -> str | None:
    """Return a sentence if ours did not run or was wrong; else None."""
    for row in rows:
        if why := row["sides"][OURS]["left_out"]:
            return f"attention of {row['model']}: {why}"
    return None
