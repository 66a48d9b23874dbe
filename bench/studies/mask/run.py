"""`thresher study mask`: what masking of retrieved tokens costs, and what it does to the gradient.

One batch of trajectories, four treatments (steps.py): time, memory and gradient of each; then the same with the
passages cut short or repeated, for the cost against the share of retrieved tokens. Prints a table and what it says in
words, writes mask.json and mask.png.

Deliberately absent: training under each treatment, which would say which one learns; that takes runs, not a batch.
"""

import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thresher.bench.studies.mask.batch import Subject, scripted, stored, stretched
from thresher.bench.studies.mask.peak_memory import peak_bytes
from thresher.bench.studies.mask.steps import (
    TREATMENTS,
    Treated,
    clear,
    head_loss,
    head_peak,
    run_step,
    timed,
    timed_heads,
    treat,
)
from thresher.common import console
from thresher.common.errors import UserError
from thresher.common.files import atomic_write_text, staged_folder
from thresher.engine.packing import Batch
from thresher.kernels.objective import LossResult
from thresher.rewards.transcript import Source

SHARES = (0.3, 0.5, 0.7, 0.8, 0.9)  # of the tokens that were retrieved or sampled: retrieved ones
SWEEP_TRAJECTORIES, SWEEP_REPEATS = 16, 15
MIB = 2**20

Gradient = dict[str, Tensor]
Record = dict[str, Any]


def run_study(out: Path, run: str | None, seed: int, repeats: int, limit: int, device: str) -> None:
    """The command. `run`: a run folder, None for the scripted batch; `out`: a folder that must not exist yet."""
    if out.exists():
        raise UserError(f"{out}: exists already; choose another folder with --out")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device is cuda, but torch sees no CUDA device; leave it out")
    started = time.perf_counter()
    subject = scripted(seed, limit, device) if run is None else stored(run, limit, device)
    console.console.print(
        f"study mask: {len(subject.trajectories)} trajectories with {subject.count(Source.RETRIEVED):,} retrieved and "
        f"{subject.count(Source.POLICY):,} sampled tokens; {subject.name}",
        soft_wrap=True,
    )
    steps = len(TREATMENTS) * (repeats + 1 + len(SHARES) * (SWEEP_REPEATS + 1))
    with console.progress_line("steps", steps) as line:
        done = 0

        def tick() -> None:
            nonlocal done
            done += 1
            line.to(done, "")

        figures = {
            "batch": describe(subject),
            "machine": machine(device),
            "repeats": repeats,
            **measure(subject, repeats, tick),
            "sweep": sweep(subject, tick),
        }
    figures["seconds"] = time.perf_counter() - started
    from thresher.bench.studies.mask.plot import draw_mask  # matplotlib takes a second that a mistake need not wait

    with staged_folder(out) as staged:
        atomic_write_text(staged / "mask.json", json.dumps(figures, indent=1, allow_nan=False) + "\n")
        draw_mask(figures, staged / "mask.png")
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
    """All figures of the batch as it is: cost and gradient of each treatment, and the checks beside them."""
    treated = {name: treat(name, subject) for name in TREATMENTS}
    clocks = timed(subject, treated, repeats, tick)
    results = {name: run_step(subject, treated[name].batches) for name in TREATMENTS}
    gradients = {name: gradient(subject, treated[name].batches) for name in TREATMENTS}
    base = gradients["masked"]
    treatments = {
        name: {
            "tokens": one.tokens,
            "rows": one.rows,
            **clocks[name].medians(),
            "times_ms": {part: getattr(clocks[name], part) for part in ("forward", "head", "backward")},
            "head_mib": head_peak(subject, one, at_once=False) / MIB,
            "head_at_once_mib": head_peak(subject, one, at_once=True) / MIB,
            "step_mib": peak_bytes(partial(run_step, subject, one.batches), subject.policy.device) / MIB,
            "gradient": compare(gradients[name], base),
            "gradient_parts": compare_parts(gradients[name], base),
            "kinds": row_figures(one, results[name]),
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


def gradient(subject: Subject, batches: Sequence[Batch]) -> Gradient:
    """The gradient of every parameter, as float64 copies."""
    run_step(subject, batches)
    return {
        name: torch.zeros_like(value, dtype=torch.float64) if value.grad is None else value.grad.double()
        for name, value in subject.policy.named_parameters()
    }


def part_of(name: str) -> str:
    """The part of the model that a parameter belongs to: "embedding, head", "layer 0 attention" or "layer 0 mlp"."""
    if not name.startswith("layers."):
        return "embedding, head"
    _, layer, weight = name.split(".")
    return f"layer {layer} {'mlp' if weight in ('post_norm', 'gate_up_weight', 'down_weight') else 'attention'}"


def compare(one: Gradient, base: Gradient) -> dict[str, float]:
    """Norm of a gradient; beside another one: cosine, and the norms of it and of the difference relative to the other's
    (0 where either is 0)."""
    norm, of_base = (sum(float(value.square().sum()) for value in side.values()) ** 0.5 for side in (one, base))
    dot = sum(float((one[name] * base[name]).sum()) for name in one)
    difference = sum(float((one[name] - base[name]).square().sum()) for name in one) ** 0.5
    known = norm > 0 and of_base > 0
    return {
        "norm": norm,
        "cosine": dot / (norm * of_base) if known else 0.0,
        "relative_norm": norm / of_base if known else 0.0,
        "difference": difference / of_base if known else 0.0,
    }


def compare_parts(one: Gradient, base: Gradient) -> dict[str, dict[str, float]]:
    """The same for each part of the model, in the order of the forward."""
    parts: dict[str, list[str]] = {}
    for name in one:
        parts.setdefault(part_of(name), []).append(name)
    return {
        part: compare({name: one[name] for name in names}, {name: base[name] for name in names})
        for part, names in parts.items()
    }


def row_figures(treated: Treated, results: Sequence[LossResult]) -> dict[str, dict[str, float]]:
    """Of sampled and of retrieved rows: how many, mean log-prob and entropy, and the share of the push, which is the
    sum of the norms of the rows' gradients at the head's input."""
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
    """What removal does to the log-probs of sampled tokens: their mean distance from those in full context, and the
    share whose ratio to these lies outside [1 - low, 1 + high], the clip range."""
    gap_R = _by_item(removed) - _by_item(masked)
    outside_R = (gap_R.exp() < 1 - low) | (gap_R.exp() > 1 + high)
    return {"logprob_gap": float(gap_R.abs().mean()), "outside_clip": float(outside_R.double().mean())}


def _by_item(treated: Treated) -> Tensor:
    """All rows' log-probs in the order of the items, for every treatment packs them in an order of its own."""
    found: dict[int, Tensor] = {}
    for batch in treated.batches:
        counts = [len(treated.items[n].positions) for n in batch.items]
        found |= zip(batch.items, batch.old_logprobs_R.split(counts), strict=True)
    return torch.cat([found[n] for n in sorted(found)]).double()


def poison_changes_nothing(subject: Subject, in_loss: Treated) -> bool:
    """Whether loss and gradients keep their bits when the retrieved rows are there at weight 0, and all else of them is
    poisoned: hidden states, old log-probs and advantages NaN, targets outside the vocabulary."""
    policy = subject.policy
    for batch, sampled_R in zip(in_loss.batches, in_loss.sampled, strict=True):
        with torch.no_grad():
            rows_RH = policy.hidden(batch.ids_T, batch.layout.positions_T, batch.layout).index_select(0, batch.rows_R)
        nan = float("nan")
        poisoned = replace(
            batch,
            targets_R=batch.targets_R.where(sampled_R, -1),
            old_logprobs_R=batch.old_logprobs_R.where(sampled_R, nan),
            advantages_R=batch.advantages_R.where(sampled_R, nan),
            weights_R=batch.weights_R.where(sampled_R, 0.0),
        )
        present = replace(
            batch,
            targets_R=batch.targets_R[sampled_R],
            old_logprobs_R=batch.old_logprobs_R[sampled_R],
            advantages_R=batch.advantages_R[sampled_R],
            weights_R=batch.weights_R[sampled_R],
        )
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


def sweep(subject: Subject, tick: Callable[[], None]) -> list[Record]:
    """Cost of the head against the share of retrieved tokens, on a part of the batch: some that did retrieve."""
    order = sorted(range(len(subject.trajectories)), key=lambda n: not subject.trajectories[n].count(Source.RETRIEVED))
    chosen = order[:SWEEP_TRAJECTORIES]
    trajectories = [subject.trajectories[n] for n in chosen]
    records = []
    for share in SHARES:
        part = replace(
            subject,
            trajectories=stretched(trajectories, share),
            advantages=[subject.advantages[n] for n in chosen],
        )
        treated = {name: treat(name, part) for name in TREATMENTS}
        times = timed_heads(part, treated, SWEEP_REPEATS, tick)
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
    """The table, a column a treatment, and the findings in words."""
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
    """A figure of one kind of rows; a dash where the treatment has none of them at the head."""
    return format(one["kinds"][kind][key], form) if kind in one["kinds"] else "-"


def findings(figures: Mapping[str, Any]) -> list[str]:
    """The comparison in sentences, each with its figures."""
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
