"""`thresher bench delta`: the gated delta rule over whole sequences, forward and backward, compared with its peers.

All contenders get the same tensors, made as in a layer, in sequences of one length, so that no peer pads. Each runs
once and is compared with float64 (our recurrence); then memory is measured, then all are timed in turn. A peer that
cannot run gets a reason in place of figures.

    floor     the products of the chunked form (engine/planning/time.py, `delta_flops`) at the rate of a bare matmul in
              the same dtype; three times that with the backward
    extra     peak memory of forward and backward beyond the memory in use before
    error     |x - truth| / |truth| over a whole tensor, the largest of o, the final states, and five gradients
    ratio     a peer's time / ours, of neighbouring calls

Axes: T tokens, B sequences, K query and key heads, V value heads, D dimension of a key, E of a value.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from inspect import unwrap
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from thresher.bench.harness import (
    MIB,
    append_rows,
    check_files,
    dtype_name,
    facts,
    in_turn,
    measure_rates,
    peak_bytes,
    print_files,
    ratios,
    reason_of,
    resolve_device,
    resolve_dtype,
    spread,
    spread_text,
)
from thresher.common.console import console, table
from thresher.common.errors import UserError
from thresher.engine.planning.time import delta_flops_of
from thresher.kernels import gated_delta
from thresher.kernels.delta import reference_gated_delta
from thresher.kernels.delta.rule import load_fla

Tensors = tuple[Tensor, ...]
Run = Callable[[Tensors], tuple[Tensor, Tensor]]  # q, k, v, decay, beta -> o [T, V, E], states [B, V, D, E]
ERROR_OF_OURS = {torch.float32: 1e-4, torch.bfloat16: 0.05}  # far below the error of a wrong kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaBench:
    """Options. The heads are Qwen3.5-0.8B's. peer: "transformers", "fla", "both" or "none"."""

    peer: str = "both"
    sequences: int = 8
    length: int = 512
    key_heads: int = 16
    value_heads: int = 16
    dim: int = 128
    rounds: int = 9
    device: str | None = None
    dtype: str | None = None


def run_delta_bench(bench: DeltaBench, out: str | Path | None = None) -> dict[str, Any]:
    """Measure, print a table, append a row of ours and then one of all sides to `out`; return the last row."""
    if bench.value_heads % bench.key_heads:
        raise UserError(
            f"--value-heads {bench.value_heads}: expected a multiple of --key-heads, {bench.key_heads}; change either"
        )
    device = resolve_device(bench.device)
    dtype = resolve_dtype(bench.dtype, device)
    check_files(out, None)
    tensors, weights = _drawn(bench, device, dtype)
    truth = _both_passes(partial(_recurrence, bench), tuple(x.double() for x in tensors), weights)
    runs: dict[str, Run] = {"ours": partial(_ours, bench)}
    failed: dict[str, str] = {}
    rate = measure_rates(device, dtype).flops_per_s

    def measured() -> dict[str, Any]:
        row = {"bench": "delta", **facts(("transformers", "flash-linear-attention")), **asdict(bench)}
        row |= {"device": device.type, "dtype": dtype_name(dtype), "failed": failed, "floor_ms": _floor_ms(bench, rate)}
        row |= {"sides": _sides(bench, runs, tensors, weights, truth)}
        append_rows(out, row)
        return row

    row = measured()
    if bench.peer != "none":  # one that ends the process does not lose the row of ours
        for name in ("transformers", "fla") if bench.peer == "both" else (bench.peer,):
            try:
                run = _peer(name, bench, device)
                _both_passes(run, tensors, weights)
            except Exception as error:  # a peer's library may raise anything
                failed[name] = reason_of(error)
            else:
                runs[name] = run
        row = measured()
    _show(row)
    print_files(out)
    return row


def _sides(
    bench: DeltaBench, runs: Mapping[str, Run], tensors: Tensors, weights: Tensors, truth: Sequence[Tensor]
) -> dict[str, dict[str, Any]]:
    """Return error, memory and times of each side."""
    sides: dict[str, dict[str, Any]] = {}
    device = tensors[0].device
    for name, run in runs.items():
        call = partial(_both_passes, run, tensors, weights)
        errors = [_error(x, y) for x, y in zip(call(), truth, strict=True)]
        sides[name] = {"error": max(errors), "errors": errors, "extra_mib": peak_bytes(call, device) / MIB}
    for part, passes in (("forward", _forward), ("step", _both_passes)):
        calls = [partial(passes, run, tensors, weights) for run in runs.values()]
        times = dict(zip(runs, in_turn(calls, bench.rounds + 1, device, lambda: None), strict=True))
        for name, found in times.items():
            sides[name] |= {f"{part}_ms": spread(found[1:]), f"{part}_ratio": ratios(found[1:], times["ours"][1:])}
    return sides


def _floor_ms(bench: DeltaBench, flops_per_s: float) -> dict[str, float]:
    tokens = bench.sequences * bench.length
    forward = 1e3 * tokens * delta_flops_of(bench.value_heads, bench.dim, bench.dim) / flops_per_s
    return {"forward": forward, "step": 3 * forward}


def failure(row: dict[str, Any]) -> str | None:
    """Return a sentence if our own result is wrong."""
    error = row["sides"]["ours"]["error"]
    limit = ERROR_OF_OURS[getattr(torch, row["dtype"])]
    return None if error <= limit else f"bench delta: ours is {error:.1e} from float64, expected at most {limit}"


def _drawn(bench: DeltaBench, device: torch.device, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    """Return q, k, v, decay and beta, and the weights of o and of the states in the differentiated sum."""
    noise, T = torch.Generator().manual_seed(0), bench.sequences * bench.length

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=noise)

    q, k = (torch.nn.functional.normalize(normal(T, bench.key_heads, bench.dim), dim=-1) for _ in range(2))
    v, decay = normal(T, bench.value_heads, bench.dim), -0.1 * normal(T, bench.value_heads).exp()
    beta = normal(T, bench.value_heads).sigmoid()
    wide = [x.to(device) for x in (decay, beta)]
    state = normal(bench.sequences, bench.value_heads, bench.dim, bench.dim).to(device)
    return (*(x.to(device, dtype) for x in (q, k, v)), *wide), (normal(*v.shape).to(device), state)


def _forward(run: Run, tensors: Tensors, weights: Tensors) -> None:
    with torch.no_grad():
        run(tensors)


def _both_passes(run: Run, tensors: Tensors, weights: Tensors) -> list[Tensor]:
    """Return o, the states and the gradients."""
    leaves = tuple(x.detach().requires_grad_(True) for x in tensors)
    out, final = run(leaves)
    ((out.float() if out.dtype == torch.bfloat16 else out) * weights[0]).sum().add(
        (final * weights[1]).sum()
    ).backward()
    return [out.detach(), final.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def _bounds(bench: DeltaBench) -> list[int]:
    return list(range(0, bench.sequences * bench.length + 1, bench.length))


def _ours(bench: DeltaBench, tensors: Tensors, backend: Literal["auto", "fla"] = "auto") -> tuple[Tensor, Tensor]:
    q, k, v, decay, beta = tensors
    return gated_delta(q, k, v, decay, beta, _bounds(bench), backend=backend)


def _recurrence(bench: DeltaBench, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Run our recurrence on all sequences at once, as one sequence with more heads."""
    B, L = bench.sequences, bench.length

    def beside(x: Tensor) -> Tensor:
        flat: Tensor = x.unflatten(0, (B, L)).transpose(0, 1).flatten(1, 2)
        return flat

    q, k, v, decay, beta = map(beside, tensors)
    out, final = reference_gated_delta(q, k, v, decay, beta, [0, L])
    return out.unflatten(1, (B, -1)).transpose(0, 1).flatten(0, 1), final[0].unflatten(0, (B, -1))


def _peer(name: str, bench: DeltaBench, device: torch.device) -> Run:
    """Return a peer's call. ImportError, or ValueError, if it is not available."""
    if name == "fla":
        load_fla(device)
        return partial(_ours, bench, backend="fla")
    from transformers.models.qwen3_5 import modeling_qwen3_5

    rule = unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)  # transformers puts fla's here, if installed

    def run(tensors: Tensors) -> tuple[Tensor, Tensor]:
        q, k, v, decay, beta = (x.unflatten(0, (bench.sequences, bench.length)) for x in tensors)
        if bench.value_heads > bench.key_heads:  # not every version repeats a key head for its value heads
            q, k = (x.repeat_interleave(bench.value_heads // bench.key_heads, dim=2) for x in (q, k))
        out, final = rule(q, k, v, g=decay, beta=beta, output_final_state=True)
        return out.flatten(0, 1), final

    return run


def _show(row: dict[str, Any]) -> None:
    for name, reason in row["failed"].items():
        console.print(f"{name} is left out: {reason}", soft_wrap=True)
    sides: Sequence[tuple[str, dict[str, Any]]] = list(row["sides"].items())
    lines = [
        ("forward, ms", *(spread_text(side["forward_ms"]) for _, side in sides), f"{row['floor_ms']['forward']:.3g}"),
        (
            "forward and backward, ms",
            *(spread_text(side["step_ms"]) for _, side in sides),
            f"{row['floor_ms']['step']:.3g}",
        ),
        ("forward, peer / ours", *(spread_text(side["forward_ratio"]) for _, side in sides), "-"),
        ("forward and backward, peer / ours", *(spread_text(side["step_ratio"]) for _, side in sides), "-"),
        ("extra memory, MiB", *(f"{side['extra_mib']:,.0f}" for _, side in sides), "-"),
        ("error", *(f"{side['error']:.1e}" for _, side in sides), "-"),
    ]
    table(
        f"gated delta rule, {row['sequences']} sequences of {row['length']} tokens, {row['key_heads']} key and "
        f"{row['value_heads']} value heads of {row['dim']}, {row['dtype']}; median (p20 to p80) of {row['rounds']}",
        ("", *(name for name, _ in sides), "floor"),
        lines,
    )
