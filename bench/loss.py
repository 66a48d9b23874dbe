"""`thresher bench loss`: the loss's forward and backward compared with its peers, on the same tensors in the same run.

A contender runs once and is compared with float64, then its memory is measured, then all are timed in turn, together
with three bare matmuls of the loss's shapes. One that cannot run, fails or is wrong gets a reason in place of figures.
Cases are ordered by importance, so that a budget cuts off the least important.

    floor       6 x R x H x V operations: logits, dX and dW, each once, for the unmasked rows
    nominal     that floor at the GPU's specified dense bfloat16 rate (engine/planning/time.py)
    measured    the same at the rate of the bare matmuls
    extra       peak memory of a call beyond the memory in use before; workspace: without the gradients it returns
    ratio       a peer's time / ours, of neighbouring calls

Axes: T tokens, B sequences, Q tokens of a sequence, R unmasked rows, M rows of a chunk, H hidden width, V vocabulary.
"""

import gc
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thresher.bench.harness import (
    MIB,
    append_rows,
    check_files,
    dtype_name,
    facts,
    hardware,
    in_turn,
    package_version,
    peak_bytes,
    print_files,
    ratios,
    resolve_device,
    resolve_dtype,
    spread,
)
from thresher.bench.loss_cases import (
    BETA,
    CLIP_HIGH,
    CLIP_LOW,
    Errors,
    LossCase,
    LossOutcome,
    LossShape,
    LossTruth,
    errors_of,
    make_case,
    objective,
    truth_of,
)
from thresher.common.console import console, progress_line, table
from thresher.common.errors import UserError
from thresher.engine.planning.time import this_chip
from thresher.kernels import grpo_loss
from thresher.kernels.operands import compute_dtype, stored_columns

# contenders

Run = Callable[[], LossOutcome]
Prepare = Callable[[LossCase, int | None], Run]
HEAD_TO_LOSS, LOGPROBS, FROM_LOGITS = "all of it", "head and log-prob; the rest in torch", "all after the head"
TRL_COLUMNS = 32768  # the vocabulary chunk of TRL's own trainer


@dataclass(frozen=True, slots=True)
class Contender:
    """One implementation. prepare(case, chunk_rows or None for the default) returns a call: one forward and backward.

    computes: the part that the contender implements; the rest is done around it in torch. package: required package,
    None for torch alone. dtypes, cuda_only: where it runs. A contender that takes log-probs gets only the unmasked
    rows, selected inside the call; one that takes a mask gets the mask.
    """

    name: str
    computes: str
    prepare: Prepare
    package: str | None = None
    cuda_only: bool = False
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    ours: bool = False

    @property
    def version(self) -> str | None:
        return package_version(self.package or "torch")

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return the reason that it cannot run here, in one sentence; None if it can."""
        if self.cuda_only and device.type != "cuda":
            return "It runs on CUDA only."
        if self.package is not None and find_spec(self.package.replace("-", "_")) is None:
            return f"{self.package} is not installed; install it with pip install {self.package}."
        if dtype not in self.dtypes:
            return f"It does not take {dtype_name(dtype)}."
        return None


def usual_chunk(case: LossCase, chunk_rows: int | None) -> int:
    """Return the chunk rows of the naive form and of bare matmuls: `chunk_rows`, or a default of the device."""
    fitting = max(2**27 // (4 * case.shape.vocab), 16)
    usual = 2048 if case.device.type == "cuda" else min(fitting, 1024)
    return min(chunk_rows or usual, case.shape.active)


def _ours(case: LossCase, chunk_rows: int | None, backend: str = "auto", buffered: bool = False) -> Run:
    """Prepare our loss. buffered: add the head's gradient to the optimiser's float32 buffer, as in training."""
    tensors = (case.hidden_TH, case.whole_head, case.targets_T, case.old_T, case.advantages_T, case.weights_T)
    options: dict[str, Any] = {"ref_logprobs_T": case.ref_T, "clip_low": CLIP_LOW, "clip_high": CLIP_HIGH, "beta": BETA}
    options |= {"kl_value": "k3", "chunk_rows": chunk_rows, "vocab_size": case.shape.vocab, "backend": backend}
    if buffered:
        dtype = compute_dtype(case.head_VH)
        options["lm_head_grad_VH"] = torch.zeros_like(case.whole_head, dtype=dtype).detach()

    def run() -> LossOutcome:
        result = grpo_loss(*tensors, **options)
        if buffered:
            # In training, the hidden states are not a leaf, and backward passes this gradient on without a copy.
            case.hidden_TH.grad, head_grad_VH = result.hidden_grad_TH, options["lm_head_grad_VH"]
        else:
            result.loss.backward()
            head_grad_VH = case.whole_head.grad
        assert case.hidden_TH.grad is not None
        return LossOutcome(result.loss, result.logprobs, case.hidden_TH.grad, head_grad_VH)

    return run


def _outcome(case: LossCase, loss: Tensor, logprobs: Tensor | None) -> LossOutcome:
    assert case.hidden_TH.grad is not None and case.head_VH.grad is not None
    return LossOutcome(loss, logprobs, case.hidden_TH.grad, case.head_VH.grad)


def _vectors(case: LossCase) -> tuple[Tensor, ...]:
    return tuple(values_T[case.index_R] for values_T in (case.old_T, case.ref_T, case.advantages_T, case.weights_T))


def _from_logprobs(case: LossCase, logprobs_of: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Run:
    """Return a run of a peer that computes log-probs [R] from hidden states [R, H], head and targets [R]."""
    vectors, targets_R = _vectors(case), case.targets_T[case.index_R]

    def run() -> LossOutcome:
        logprobs_R = logprobs_of(case.hidden_TH[case.mask_T], case.head_VH, targets_R)
        loss = objective(logprobs_R, *vectors).sum()
        loss.backward()
        return _outcome(case, loss, logprobs_R)

    return run


def naive_logprobs(hidden_RH: Tensor, head_VH: Tensor, targets_R: Tensor) -> Tensor:
    """Return log-probs [R] from all logits at once, in float32."""
    return -F.cross_entropy((hidden_RH @ head_VH.t()).float(), targets_R, reduction="none")


def _compiled(case: LossCase, chunk_rows: int | None) -> Run:
    compiled = torch.compile(naive_logprobs)

    def logprobs_of(hidden_RH: Tensor, head_VH: Tensor, targets_R: Tensor) -> Tensor:
        # The number of unmasked rows changes from batch to batch; the model's widths do not.
        torch._dynamo.maybe_mark_dynamic(hidden_RH, 0)
        torch._dynamo.maybe_mark_dynamic(targets_R, 0)
        logprobs_R: Tensor = compiled(hidden_RH, head_VH, targets_R)
        return logprobs_R

    return _from_logprobs(case, logprobs_of)


def _chunked(case: LossCase, chunk_rows: int | None) -> Run:
    """Run the naive form in chunks of rows; a chunk's gradient comes before the next chunk's logits."""
    vectors, targets_R = _vectors(case), case.targets_T[case.index_R]
    rows = usual_chunk(case, chunk_rows)

    def run() -> LossOutcome:
        total, kept = torch.zeros((), device=case.device), []
        rows_RH = case.hidden_TH.detach()[case.mask_T]
        grad_RH = torch.empty_like(rows_RH)
        for start in range(0, len(targets_R), rows):
            part = slice(start, start + rows)
            part_RH = rows_RH[part].requires_grad_()
            logprobs_R = naive_logprobs(part_RH, case.head_VH, targets_R[part])
            loss = objective(logprobs_R, *(values_R[part] for values_R in vectors)).sum()
            loss.backward()
            assert part_RH.grad is not None
            grad_RH[part] = part_RH.grad
            total += loss.detach()
            kept.append(logprobs_R.detach())
        case.hidden_TH.grad = torch.zeros_like(case.hidden_TH).index_copy_(0, case.index_R, grad_RH)
        return _outcome(case, total, torch.cat(kept))

    return run


def _by_sequence(case: LossCase) -> tuple[Tensor, ...]:
    """Return ids, old and reference log-probs and mask, each [B, Q], for peers that take whole sequences."""
    return tuple(map(case.sequences, (case.targets_T, case.old_T, case.ref_T, case.mask_T.float())))


def _liger_fused(case: LossCase, chunk_rows: int | None, tf32: bool = False) -> Run:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss_of = LigerFusedLinearGRPOLoss(
        beta=BETA,
        # It compiles the part after the log-probs. On a CPU that part is small and g++ slow.
        compiled=case.device.type == "cuda",
        use_ref_model=True,
        chunk_size=1,
        epsilon_low=CLIP_LOW,
        epsilon_high=CLIP_HIGH,
        loss_type="dapo",
        temperature=1.0,
    )
    (ids_BQ, old_BQ, ref_BQ, mask_BQ), advantages_B = _by_sequence(case), case.advantages_B
    options = {"ref_per_token_logps": ref_BQ, "old_per_token_logps": old_BQ}

    def run() -> LossOutcome:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        try:
            hidden_BQH = case.sequences(case.hidden_TH)
            loss, _ = loss_of(hidden_BQH, case.head_VH, ids_BQ, mask_BQ, advantages_B, **options)
            loss.backward()
        finally:
            torch.set_float32_matmul_precision(before)
        return _outcome(case, loss, None)

    return run


def _liger_triton(case: LossCase, chunk_rows: int | None) -> Run:
    """Append a row of zeros to each sequence: the kernel takes logits of Q + 1 positions and ignores the last."""
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    padded_BQH = F.pad(case.sequences(case.hidden_TH.detach()), (0, 0, 0, 1)).requires_grad_()
    (ids_BQ, old_BQ, ref_BQ, mask_BQ), advantages_B = _by_sequence(case), case.advantages_B
    options = {"completion_mask": mask_BQ, "temperature": 1.0, "beta": BETA, "eps_low": CLIP_LOW, "eps_high": CLIP_HIGH}
    options |= {"inplace": True, "loss_type": "dapo", "reduce": True}

    def run() -> LossOutcome:
        padded_BQH.grad = None
        loss, _ = triton_grpo_loss(padded_BQH @ case.head_VH.t(), old_BQ, ref_BQ, ids_BQ, advantages_B, **options)
        loss.backward()
        assert padded_BQH.grad is not None and case.head_VH.grad is not None
        return LossOutcome(loss, None, padded_BQH.grad[:, :-1].flatten(0, 1), case.head_VH.grad)

    return run


def _trl(case: LossCase, chunk_rows: int | None) -> Run:
    from trl.kernels import ChunkedLogProbFunction

    columns = min(TRL_COLUMNS, case.shape.vocab)

    def logprobs_of(hidden_RH: Tensor, head_VH: Tensor, targets_R: Tensor) -> Tensor:
        # Entropy, because its trainer logs it; ours computes it too.
        found = ChunkedLogProbFunction.apply(hidden_RH, head_VH, None, targets_R, 1.0, columns, None, 1.0, ("entropy",))
        logprobs_R: Tensor = found[0]
        return logprobs_R

    return _from_logprobs(case, logprobs_of)


def _cce(case: LossCase, chunk_rows: int | None) -> Run:
    from cut_cross_entropy import linear_cross_entropy

    def logprobs_of(hidden_RH: Tensor, head_VH: Tensor, targets_R: Tensor) -> Tensor:
        losses_R: Tensor = linear_cross_entropy(hidden_RH, head_VH, targets_R, reduction="none", filter_eps=None)
        return -losses_R

    return _from_logprobs(case, logprobs_of)


OURS = (
    Contender("ours", HEAD_TO_LOSS, _ours, ours=True),
    Contender("ours, in place", HEAD_TO_LOSS, partial(_ours, buffered=True), ours=True),
)
OURS_IN_TORCH = Contender("ours, torch backend", HEAD_TO_LOSS, partial(_ours, backend="torch"), ours=True)
LIGER, TF32 = "liger-kernel", partial(_liger_fused, tf32=True)
PEERS = {
    "naive": Contender("naive", LOGPROBS, lambda case, chunk_rows: _from_logprobs(case, naive_logprobs)),
    "chunked": Contender("naive, chunked", HEAD_TO_LOSS, _chunked),
    "compiled": Contender("naive, compiled", LOGPROBS, _compiled),
    "liger": Contender("Liger fused", HEAD_TO_LOSS, _liger_fused, LIGER),
    "liger-tf32": Contender("Liger fused, TF32", HEAD_TO_LOSS, TF32, LIGER, cuda_only=True),
    "liger-triton": Contender("Liger triton", FROM_LOGITS, _liger_triton, LIGER, cuda_only=True),
    "trl": Contender("TRL chunked", LOGPROBS, _trl, "trl"),
    "cce": Contender("CCE", LOGPROBS, _cce, "cut-cross-entropy", cuda_only=True, dtypes=(torch.bfloat16,)),
}


def contenders(device: torch.device, chosen: list[str]) -> list[Contender]:
    """Return ours, then the peers with these names."""
    own = [*OURS, OURS_IN_TORCH] if device.type == "cuda" else list(OURS)
    return own + [PEERS[name] for name in chosen]


# measurement

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
# Largest accepted errors: log-prob in nats, loss and gradients relative. Peers may round logits.
LIMITS = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (1e-3, 1e-2)}
PEER_LIMITS = {torch.float32: (1e-2, 1e-2), torch.bfloat16: (0.2, 0.1)}
CASE_SECONDS = {"cuda": 3.0, "cpu": 8.0}  # of timed rounds, between FEWEST and MOST of them
FEWEST, MOST = 5, 50
OUT_OF_TIME = "The budget was used up."
AXES = ("hidden", "vocab", "tokens", "density")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBench:
    """Options of the bench. None: the defaults of the device. peers: names of PEERS. budget: seconds."""

    device: str | None = None
    dtype: str | None = None
    hidden: Sequence[int] | None = None
    tokens: Sequence[int] | None = None
    vocab: Sequence[int] | None = None
    density: Sequence[int] | None = None
    peers: Sequence[str] = field(default_factory=lambda: tuple(PEERS))
    chunk_rows: int | None = None
    budget: float = math.inf

    def shapes(self) -> list[LossShape]:
        """Return all cases, the most important first."""
        usual = SHAPES[resolve_device(self.device).type]
        axes = {name: sorted(set(getattr(self, name) or usual[name])) for name in usual}
        main = MAIN_TOKENS if MAIN_TOKENS in axes["tokens"] else axes["tokens"][-1]
        densest = axes["density"][-1]
        made = [LossShape(**dict(zip(axes, values, strict=True))) for values in product(*axes.values())]
        return sorted(
            made, key=lambda s: (s.density != densest, s.tokens != main, s.hidden, s.vocab, s.tokens, -s.density)
        )


@dataclass(frozen=True, slots=True)
class Entrant:
    """A contender that was verified on a case, and its memory in bytes."""

    contender: Contender
    run: Run
    errors: Errors
    extra: int
    workspace: int


def read_peers(text: str) -> tuple[str, ...]:
    """Return the names in "all", "none" or "name,name"."""
    names = {"all": tuple(PEERS), "none": ()}.get(text, tuple(text.split(",")))
    for name in names:
        if name not in PEERS:
            raise UserError(
                f"--peers {text}: {name!r} is not a peer; expected all, none, or some of {', '.join(PEERS)}"
            )
    return names


def run_loss_bench(
    bench: LossBench, out: str | Path | None = None, plot: str | Path | None = None
) -> list[dict[str, Any]]:
    """Measure, append the rows to `out` as they are made, draw `plot`, print a table. Return the rows of the measured
    cases; `failure` tells whether ours is wrong."""
    device, shapes = resolve_device(bench.device), bench.shapes()
    dtype = resolve_dtype(bench.dtype, device)
    check_files(out, plot)
    chosen = contenders(device, list(bench.peers))
    deadline = time.monotonic() + bench.budget
    head = {"bench": "loss", **facts(("triton", "liger-kernel", "trl", "cut-cross-entropy"))}
    head["device"] = device.type
    console.print(
        f"{len(shapes)} cases in {dtype_name(dtype)} on {hardware(head)}: forward and"
        f" backward of ours and {len(bench.peers)} peers, each checked against float64 first"
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
            except torch.OutOfMemoryError as error:  # in the case itself; a contender's is recorded in its row
                left_out[shape] = _sentence(error)
                continue
            append_rows(out, rows[-1])
            line.to(number, str(shape))
    _show(rows)
    if left_out:
        reasons = [{**asdict(shape), "reason": reason} for shape, reason in left_out.items()]
        append_rows(out, {**head, "left_out": reasons})
    for reason in dict.fromkeys(left_out.values()):
        console.print(f"left out: {'; '.join(str(shape) for shape in left_out if left_out[shape] == reason)}: {reason}")
    if plot is not None and rows:
        from thresher.bench.plots import draw_loss  # measuring needs no matplotlib

        draw_loss(rows, Path(plot))
    print_files(out, plot if rows else None)
    return rows


def forget_compilations() -> None:
    """Reset torch.compile, which would count other widths as changes of one model."""
    if "torch._dynamo" in sys.modules:  # importing it takes seconds
        torch._dynamo.reset()


def failure(rows: Sequence[dict[str, Any]]) -> str | None:
    """Return one sentence if a row lacks our figures for a reason other than the budget; else None."""
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
    """Return the part of a row for one case."""
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
    chip = this_chip(device) if device.type == "cuda" and dtype == torch.bfloat16 else None
    floors = {
        "nominal": None if chip is None else 1e3 * shape.flops / chip.flops_per_s,
        "measured": 1e3 * shape.flops / rate,
    }
    taken = {entrant.contender.name: ms for entrant, ms in zip(entrants, times[len(matmuls) :], strict=True)}
    found = {entrant.contender.name: _figures(entrant, taken[entrant.contender.name], floors) for entrant in entrants}
    reasons = [one for one in chosen if one.name in left_out]
    found |= {one.name: {"version": one.version, "left_out": left_out[one.name]} for one in reasons}
    ours = [contender.name for contender in chosen if contender.ours]
    return {
        "shape": {**asdict(shape), "active": shape.active, "sequences": shape.sequences},
        "dtype": dtype_name(dtype),
        "chunk_rows": chunk_rows,
        "rounds": rounds,
        "matmul": {"rows": rows, "tflops": rate / 1e12},
        "floor_ms": floors,
        "ours": {name: found[name] for name in ours},
        "peers": {name: figures for name, figures in found.items() if name not in ours},
        "ratio": {
            name: {peer: ratios(taken[peer], taken[name]) for peer in taken if peer not in ours}
            for name in ours
            if name in taken
        },
    }


def enter(contender: Contender, case: LossCase, truth: LossTruth, chunk_rows: int | None) -> Entrant | str:
    """Verify a contender, warm it up and measure its memory; or return the reason in one sentence."""
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
    except Exception as error:  # a peer may fail in any way, which is a result too
        return _sentence(error)
    finally:
        case.drop_gradients()
        if case.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def bare_matmuls(case: LossCase, rows: int) -> list[Callable[[], Any]]:
    """Return calls that only compute logits, dX and dW of a chunk of `rows` rows, in the case's dtype. If the head has
    more rows, the number of columns is rounded up to a multiple that suits matmuls, because the floor is the best
    attainable time."""
    head_VH = case.whole_head.detach()[: stored_columns(case.shape.vocab)]
    rows_MH = case.hidden_TH.detach()[case.index_R[:rows]]
    logits_MV = torch.mm(rows_MH, head_VH.t())
    return [
        lambda: torch.mm(rows_MH, head_VH.t(), out=logits_MV),
        lambda: torch.mm(logits_MV, head_VH),
        lambda: torch.mm(logits_MV.t(), rows_MH),
    ]


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
    """Return the first line of an error, short enough for a table's foot."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    return f"{type(error).__name__}: {lines[0][:200].rstrip('.')}."


def _show(rows: Sequence[dict[str, Any]]) -> None:
    """Print one table, with a block of rows per case; then the reasons of missing contenders."""
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
            "GRPO loss, forward and backward (a case: H x V, T, active): median time; its ratio to ours; share of the "
            "floor, nominal before measured; memory beside dX and dW; errors against float64",
            ("", "ms", "/ ours", "floor", "MiB", "log-prob", "dX", "dW"),
            lines,
        )
    for (name, reason), where_all in reasons.items():
        console.print(f"{name}, {'everywhere' if len(where_all) == len(rows) else '; '.join(where_all)}: {reason}")
