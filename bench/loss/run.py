"""`thresher bench loss`: the loss's forward and backward beside its peers, on the same tensors in the same run.

For every case: make the tensors and the float64 truth (cases.py); run each contender once (peers.py) and hold
its loss, log-probs and gradients to the truth; measure its memory; then let all of them take turns on the clock, with
three bare matmuls of the loss's shapes among them. A contender that cannot run, fails, or is wrong gets a reason in
place of figures. If ours fails or is wrong, the command ends with status 1 once all rows are written.

    floor       6 x R x H x V operations: logits, dX and dW, each once, for the unmasked rows
    nominal     that floor at the GPU's specified dense bfloat16 rate (engine/planning/time.py)
    measured    the same at the rate of the bare matmuls
    extra       the most that torch held during a call beyond what it held before; workspace: without the gradients
                that the call hands over
    ratio       a peer's time by ours, of neighbouring calls

Rows are written as they are made. Cases come in the order of their weight, T = 8,192 with no row masked first, so
that a budget of seconds cuts off what matters least, and says what.

Deliberately absent: timing the forward alone, and tuning.

Axes: R unmasked rows, M rows of a chunk, H hidden width, V vocabulary (docs/notation.md).
"""

import gc
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch

from thresher.bench.loss.cases import Errors, LossCase, LossShape, LossTruth, errors_of, make_case, truth_of
from thresher.bench.loss.peers import PEERS, Contender, Run, contenders, usual_chunk
from thresher.bench.machine import facts
from thresher.bench.measure import in_turn, peak_bytes, spread
from thresher.bench.rows import append_rows, check_files
from thresher.common.console import console, progress_line, table
from thresher.common.errors import UserError
from thresher.engine.planning.time import this_chip
from thresher.kernels.matmul import stored_columns

MAIN_TOKENS = 8192
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "cuda": {
        "hidden": (896, 1536, 2048, 3584),
        "tokens": (2048, 4096, 8192, 16384),
        "vocab": (151665, 151936),  # the tokens of Qwen2.5's tokenizer, and the rows of its head
        "density": (100, 50, 25),
    },
    "cpu": {"hidden": (64, 256), "tokens": (512, 2048), "vocab": (2000, 20000), "density": (100, 25)},
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Largest errors that are still right: log-prob in nats, loss and gradients relative. Peers may round logits.
LIMITS = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (1e-3, 1e-2)}
PEER_LIMITS = {torch.float32: (1e-2, 1e-2), torch.bfloat16: (0.2, 0.1)}
CASE_SECONDS = {"cuda": 3.0, "cpu": 8.0}  # of timed rounds, within FEWEST and MOST
FEWEST, MOST = 5, 50
MIB = 2**20
OUT_OF_TIME = "The budget was used up."
AXES = ("hidden", "vocab", "tokens", "density")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBench:
    """What to measure. None: what the device is usually measured on. peers: names of PEERS. budget: seconds."""

    device: str | None = None
    dtype: str | None = None
    hidden: Sequence[int] | None = None
    tokens: Sequence[int] | None = None
    vocab: Sequence[int] | None = None
    density: Sequence[int] | None = None
    peers: Sequence[str] = field(default_factory=lambda: tuple(PEERS))
    chunk_rows: int | None = None
    budget: float = math.inf

    def resolved_device(self) -> torch.device:
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError(f"--device cuda: torch {torch.__version__} sees none; run where there is one, or with cpu")
        return torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def resolved_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype or ("bfloat16" if self.resolved_device().type == "cuda" else "float32")]

    def shapes(self) -> list[LossShape]:
        """All cases, the weightiest first."""
        usual = SHAPES[self.resolved_device().type]
        axes = {name: sorted(set(getattr(self, name) or usual[name])) for name in usual}
        main = MAIN_TOKENS if MAIN_TOKENS in axes["tokens"] else axes["tokens"][-1]
        densest = axes["density"][-1]
        made = [LossShape(**dict(zip(axes, values, strict=True))) for values in product(*axes.values())]
        return sorted(
            made,
            key=lambda s: (s.density != densest, s.tokens != main, s.hidden, s.vocab, s.tokens, -s.density),
        )


@dataclass(frozen=True, slots=True)
class Entrant:
    """A contender that was proved right on a case, and what it takes."""

    contender: Contender
    run: Run
    errors: Errors
    extra: int
    workspace: int


def read_peers(text: str) -> tuple[str, ...]:
    """The names in "all", "none" or "name,name"."""
    names = {"all": tuple(PEERS), "none": ()}.get(text, tuple(text.split(",")))
    for name in names:
        if name not in PEERS:
            raise UserError(f"--peers {text}: {name!r} is none; expected all, none, or some of {', '.join(PEERS)}")
    return names


def run_loss_bench(
    bench: LossBench, out: str | Path | None = None, plot: str | Path | None = None
) -> list[dict[str, Any]]:
    """Measure, append the rows to `out` as they are made, draw `plot`, print a table. Returns the rows of the cases
    that were measured; `failure` says whether ours is among the wrong."""
    device, dtype, shapes = bench.resolved_device(), bench.resolved_dtype(), bench.shapes()
    check_files(out, plot)
    chosen = contenders(device, list(bench.peers))
    deadline = time.monotonic() + bench.budget
    head = {"bench": "loss", **facts(("triton", "liger-kernel", "trl", "cut-cross-entropy"))}
    console.print(
        f"{len(shapes)} cases in {str(dtype).removeprefix('torch.')} on {head['gpu'] or head['machine']}: forward and"
        f" backward of ours and {len(bench.peers)} peers, each held to float64 first"
    )
    rows: list[dict[str, Any]] = []
    left_out: dict[LossShape, str] = {}
    widths = None
    with progress_line("loss", len(shapes)) as line:
        for number, shape in enumerate(shapes, 1):
            if time.monotonic() >= deadline:
                left_out[shape] = OUT_OF_TIME
                continue
            if widths != (shape.hidden, shape.vocab):
                forget_compilations()
                widths = (shape.hidden, shape.vocab)
            try:
                rows.append({**head, **measure_case(shape, chosen, device, dtype, bench.chunk_rows, deadline)})
            except torch.OutOfMemoryError as error:  # of the case itself; what a contender runs out of is its own row
                left_out[shape] = _sentence(error)
                continue
            append_rows(out, rows[-1])
            line.to(number, str(shape))
    _show(rows)
    if left_out:
        append_rows(
            out, {**head, "left_out": [{**asdict(shape), "reason": reason} for shape, reason in left_out.items()]}
        )
    for reason in dict.fromkeys(left_out.values()):
        console.print(f"left out: {'; '.join(str(shape) for shape in left_out if left_out[shape] == reason)}: {reason}")
    if plot is not None and rows:
        from thresher.bench.loss.plot import draw  # measuring needs no matplotlib

        draw(rows, Path(plot))
    for what, path in (("appended to", out), ("drawn in", plot if rows else None)):
        if path is not None:
            console.print(f"{what} {path}")
    return rows


def forget_compilations() -> None:
    """For another model's widths: torch.compile would count them as changes of one model, and give up compiling."""
    if "torch._dynamo" in sys.modules:  # loading it takes seconds
        torch._dynamo.reset()


def failure(rows: Sequence[dict[str, Any]]) -> str | None:
    """One sentence if ours has no figures in any row, for another reason than the budget; None if all is well."""
    wrong = [
        f"{name} at {LossShape(**{axis: row['shape'][axis] for axis in AXES})}: {found['left_out']}"
        for row in rows
        for name, found in row["ours"].items()
        if found.get("left_out", OUT_OF_TIME) != OUT_OF_TIME
    ]
    return f"{len(wrong)} of ours could not be measured, the first: {wrong[0]}" if wrong else None


def measure_case(
    shape: LossShape,
    chosen: Sequence[Contender],
    device: torch.device,
    dtype: torch.dtype,
    chunk_rows: int | None = None,
    deadline: float = math.inf,
) -> dict[str, Any]:
    """The part of a row that belongs to one case."""
    case = make_case(shape, device, dtype)
    truth = truth_of(case)
    entrants: list[Entrant] = []
    left_out: dict[str, str] = {}
    for contender in chosen:
        late = OUT_OF_TIME if time.monotonic() >= deadline else None
        entered = contender.unavailable(device, dtype) or late or enter(contender, case, truth, chunk_rows)
        if isinstance(entered, str):
            left_out[contender.name] = entered
        else:
            entrants.append(entered)
    rows = usual_chunk(case, chunk_rows)
    matmuls = bare_matmuls(case, rows)
    runs: list[Callable[[], Any]] = [*matmuls, *(entrant.run for entrant in entrants)]
    once = sum(times[0] for times in in_turn(runs, 1, device, case.drop_gradients))
    rounds = min(max(int(1e3 * CASE_SECONDS[device.type] / once), FEWEST), MOST)
    times = in_turn(runs, rounds, device, case.drop_gradients)
    case.drop_gradients()
    rate = 6 * rows * shape.hidden * shape.vocab / sum(1e-3 * spread(taken)["p50"] for taken in times[: len(matmuls)])
    floors = {"nominal": _floor(shape, _nominal(device, dtype)), "measured": _floor(shape, rate)}
    taken = {entrant.contender.name: ms for entrant, ms in zip(entrants, times[len(matmuls) :], strict=True)}
    found = {entrant.contender.name: _figures(entrant, taken[entrant.contender.name], floors) for entrant in entrants}
    for contender in chosen:
        if contender.name in left_out:
            found[contender.name] = {"version": contender.version, "left_out": left_out[contender.name]}
    ours = [contender.name for contender in chosen if contender.ours]
    return {
        "shape": {**asdict(shape), "active": shape.active, "sequences": shape.sequences},
        "dtype": str(dtype).removeprefix("torch."),
        "chunk_rows": chunk_rows,
        "rounds": rounds,
        "matmul": {"rows": rows, "tflops": rate / 1e12},
        "floor_ms": floors,
        "ours": {name: found[name] for name in ours},
        "peers": {name: figures for name, figures in found.items() if name not in ours},
        "ratio": {
            name: {
                peer: spread([theirs / mine for theirs, mine in zip(taken[peer], taken[name], strict=True)])
                for peer in taken
                if peer not in ours
            }
            for name in ours
            if name in taken
        },
    }


def enter(contender: Contender, case: LossCase, truth: LossTruth, chunk_rows: int | None) -> Entrant | str:
    """Prove a contender right, warm it up and measure its memory; or say in one sentence why not."""
    limits = (LIMITS if contender.ours else PEER_LIMITS)[case.dtype]
    try:
        case.drop_gradients()
        run = contender.prepare(case, chunk_rows)
        errors = errors_of(run(), truth)
        wrong = errors.worse_than(*limits)
        if wrong:
            values = ", ".join(f"{name} {getattr(errors, name):.1e}" for name in wrong)
            return f"It is off by more than {limits[0]:g} nats or {limits[1]:g}: {values}."
        case.drop_gradients()
        extra = peak_bytes(run, case.device)
        leaves = (case.hidden_TH, case.head_VH, case.whole_head)
        handed = [leaf.grad for leaf in leaves if leaf.grad is not None]
        case.drop_gradients()
        return Entrant(contender, run, errors, extra, extra - sum(grad.nbytes for grad in handed))
    except Exception as error:  # a peer may fail in any way, and that is a result too
        return _sentence(error)
    finally:
        case.drop_gradients()
        if case.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def bare_matmuls(case: LossCase, rows: int) -> list[Callable[[], Any]]:
    """logits, dX and dW of a chunk of `rows` rows, in the case's dtype, and nothing else. Over a multiple
    of columns that suits them where the head has the rows, for the floor is what could be reached."""
    head_VH = case.whole_head.detach()[: stored_columns(case.shape.vocab)]
    rows_MH = case.hidden_TH.detach()[case.index_R[:rows]]
    logits_MV = torch.mm(rows_MH, head_VH.t())
    return [
        lambda: torch.mm(rows_MH, head_VH.t(), out=logits_MV),
        lambda: torch.mm(logits_MV, head_VH),
        lambda: torch.mm(logits_MV.t(), rows_MH),
    ]


def _nominal(device: torch.device, dtype: torch.dtype) -> float | None:
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    chip = this_chip(device)
    return None if chip is None else chip.flops_per_s


def _floor(shape: LossShape, rate: float | None) -> float | None:
    return None if rate is None else 1e3 * shape.flops / rate


def _figures(entrant: Entrant, times: Sequence[float], floors: dict[str, float | None]) -> dict[str, Any]:
    ms = spread(times)
    return {
        "version": entrant.contender.version,
        "computes": entrant.contender.computes,
        "ms": ms,
        "share": {name: None if floor is None else floor / ms["p50"] for name, floor in floors.items()},
        "extra_mib": entrant.extra / MIB,
        "workspace_mib": entrant.workspace / MIB,
        "errors": asdict(entrant.errors),
    }


def _sentence(error: Exception) -> str:
    """The first line of what went wrong, short enough for a table's foot."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    return f"{type(error).__name__}: {lines[0][:200].rstrip('.')}."


def _show(rows: Sequence[dict[str, Any]]) -> None:
    """One table, a block of rows a case; then why anyone is missing from it."""
    lines: list[tuple[str, ...]] = []
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        where = "{hidden:,} x {vocab:,}, {tokens:,}, {density}%".format(**row["shape"])
        lines.append((where, *[""] * 7))
        ratios: dict[str, Any] = next(iter(row["ratio"].values()), {})
        for name, found in (row["ours"] | row["peers"]).items():
            if "left_out" in found:
                reasons.setdefault((name, found["left_out"]), []).append(where)
                continue
            errors = (found["errors"][key] for key in ("logprob", "hidden_grad", "head_grad"))
            lines.append(
                (
                    f"  {name}",
                    f"{found['ms']['p50']:.3g}",
                    f"{ratios[name]['p50']:.2f}" if name in ratios else "",
                    " ".join(f"{share:.0%}" for share in found["share"].values() if share is not None),
                    f"{found['workspace_mib']:,.0f}",
                    *("-" if error is None else f"{error:.0e}" for error in errors),
                )
            )
    if lines:
        table(
            "GRPO loss, forward and backward (a case: H x V, T, active): median time; that by ours; share of the floor,"
            " nominal before measured; memory beside dX and dW; errors against float64",
            ("", "ms", "by ours", "floor", "MiB", "log-prob", "dX", "dW"),
            lines,
        )
    for (name, reason), where_all in reasons.items():
        console.print(f"{name}, {'everywhere' if len(where_all) == len(rows) else '; '.join(where_all)}: {reason}")
