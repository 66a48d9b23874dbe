"""`thresher bench gpu-check` (`make gpu-check`): all that a GPU has to confirm, in eight minutes, as one table.

A part is a command in a process of its own with a limit of its own: a failure, or a kernel that hangs, costs that part
alone. Benches append their rows while they measure: the rows of a part that was cut off are kept. Tuning comes before
the benches: it compiles every candidate, and the others use its result.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import which
from typing import Any

from thresher.bench.harness import append_rows, check_files, facts, read_rows
from thresher.common.console import console, table
from thresher.common.errors import UserError
from thresher.common.machine import checkout, gpu

FEWEST_SECONDS = 5.0  # with less left, a part is not begun
ROWS = 8192
COLUMNS = 151_665  # of Qwen2.5's tokenizer: what a trainer's head is cut to
LOSS_TARGETS = {1536: 0.61, 2048: 0.63, 3584: 0.66}  # of the floor 6THV, by width
DECODER_TESTS = "tests/engine/decoding/test_decoder_cuda.py"
# Under racecheck: tests of a few small launches, one for each file of kernels. The tests before it ran them too, so
# that Triton has their binaries. The loss's runs the head and its reduction.
RACED = (
    "test_coefficients_triton.py::test_the_head_gradient_is_added_to_a_buffer",
    "test_coefficients_triton.py::test_probabilities_that_underflow_add_nothing_to_the_entropys_gradient",
    "attention/test_decode_triton.py::test_a_draft_whose_part_holds_only_later_keys_adds_nothing",
    "attention/test_cascade_triton.py::test_a_prefix_is_read_once_and_not_by_its_members",
    "attention/test_prefill_triton.py::test_longest_may_be_more_than_any_run_and_queries_a_view",
    "test_sampling_triton.py::test_one_temperature_for_all_rows_is_not_copied",
    "test_norm_triton.py::test_a_frozen_weight_has_no_sums",
    "test_heads_triton.py::test_weights_gradients_are_sums_of_several_programs",
    "test_gate_triton.py::test_strides_and_broadcast_gradients",
    "test_rope_triton.py::test_a_row_of_nans_stays_in_its_place",
)


@dataclass(frozen=True, slots=True)
class TableLine:
    """A row of the table; "-" for a figure that is not known."""

    what: str
    measured: str
    predicted: str = "-"
    target: str = "-"
    peer: str = "-"


Read = Callable[[Sequence[dict[str, Any]]], list[TableLine]]


@dataclass(frozen=True, slots=True)
class CheckPart:
    """command: arguments, with {out} for its rows' file. seconds: its limit. rows: the beginning of that file's name.
    lines: of the rows that it wrote. needs: a program without which it is left out."""

    name: str
    command: tuple[str, ...]
    seconds: float
    rows: str | None = None
    lines: Read = field(default=lambda rows: [])
    environment: tuple[tuple[str, str], ...] = ()
    needs: str | None = None


def loss_lines(rows: Sequence[dict[str, Any]]) -> list[TableLine]:
    """Make a line a width: the share of the floor that ours reaches, and the peers' times by ours."""
    lines = []
    for row in rows:
        hidden = row["shape"]["hidden"]
        target = f"{LOSS_TARGETS[hidden]:.0%} of the floor" if hidden in LOSS_TARGETS else "-"
        for name, found in row["ours"].items():
            peers = [f"{peer} {ratio['p50']:.2f}x" for peer, ratio in row["ratio"].get(name, {}).items()]
            share = found.get("share", {}).get("nominal")
            measured = found.get("left_out") or ("-" if share is None else f"{share:.0%} of the floor")
            lines.append(TableLine(f"loss, H {hidden:,}", measured, "-", target, ", ".join(peers) or "-"))
    return lines


def decode_lines(rows: Sequence[dict[str, Any]]) -> list[TableLine]:
    """Make a line for the rate of each shape, and one for the host."""
    lines = []
    for row in rows:
        shape, share = row["shape"], row["floor_share"]
        kind = f"{shape['shared']:,} shared + {shape['own']:,}" if shape["shared"] else f"context {shape['own']:,}"
        measured = f"{row['tokens_per_s']:,.0f} tokens/s"
        wanted = f"{row['predicted_share']:.0%} of the floor"
        predicted = "-"
        if row["floor_s"] is not None:
            measured += f", {share:.0%}"
            predicted = f"{row['predicted_share'] * shape['batch'] / row['floor_s']:,.0f} tokens/s"
        lines.append(TableLine(f"decode {row['model']}, {kind}", measured, predicted, wanted))
        host = f"{1e3 * row['host_s']:.2f} ms"
        lines.append(TableLine(f"  the host's part of a step, {row['model']}", host, "-", ".5 ms"))
    return lines


def rollout_lines(rows: Sequence[dict[str, Any]]) -> list[TableLine]:
    """Make a line a shape and peer."""
    return [
        TableLine(
            f"rollout {row['shape']}, {row['tokens']} tokens",
            f"{row['ours_tokens_per_s']['p50']:,.0f} tokens/s",
            "-",
            "3x generate_batch" if row["peer"] == "generate_batch" else "-",
            f"{row['peer']} {row['ratio']['p50']:.2f}x" if row["ratio"] else f"{row['peer']}: {row['peer_failure']}",
        )
        for row in rows
        if row["peer"] is not None
    ]


def step_lines(rows: Sequence[dict[str, Any]]) -> list[TableLine]:
    """Make two lines a shape: tokens a second of a step beside the peer, and what shared prefixes gain."""
    lines = []
    for row in rows:
        measured = f"{row['shared']['tokens_per_s']['p50']:,.0f} tokens/s"
        peer = "-" if row["ratio_step"] is None else f"TRL {row['ratio_step']:.2f}x"
        lines.append(TableLine(f"step {row['shape']}, {row['tokens']:,} tokens", measured, peer=peer))
        predicted = f"{row['asked_tokens'] / row['computed_tokens']:.2f}x by tokens"
        lines.append(TableLine("  its update, prefixes shared by unshared", f"{row['shared_gain']:.2f}x", predicted))
    return lines


def parts(root: Path) -> tuple[CheckPart, ...]:
    """List all parts; root: of the checkout. Their limits add up to seven and a half minutes."""
    kernels = root / "tests" / "kernels"
    tests = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    bench = (sys.executable, "-m", "thresher.cli", "bench")
    cuda = ("--device", "cuda")
    loss = ("loss", *cuda, "--vocab", str(COLUMNS), "--tokens", str(ROWS), "--density", "100")
    bits = str(kernels / "test_bits_settings.py")
    racecheck = ("compute-sanitizer", "--tool", "racecheck", "--error-exitcode", "1")

    def measured(name: str, lines: Read, seconds: float, budget: int, *options: str) -> CheckPart:
        command = (*bench, *(loss if name == "loss" else (name, *cuda)), *options, "--budget", str(budget))
        return CheckPart(name=name, command=(*command, "--out", "{out}"), seconds=seconds, rows=name, lines=lines)

    return (
        CheckPart("tests", (*tests, str(kernels), str(root / DECODER_TESTS), "--ignore", bits), 100),
        CheckPart(
            name="tuning",
            command=(*bench, *loss, "--hidden", "1536", "--peers", "none", "--budget", "50"),
            seconds=85,
            environment=(("THRESHER_AUTOTUNE", "1"),),
        ),
        measured("loss", loss_lines, 60, 40, "--hidden", "1536", "3584"),
        measured("decode", decode_lines, 75, 50, "--steps", "32"),
        measured("rollout", rollout_lines, 50, 35, "--shape", "rag", "--rounds", "2"),
        measured("step", step_lines, 55, 35, "--shape", "0.5B", "--steps", "2"),
        CheckPart(
            name="racecheck",
            command=(*racecheck, *tests, *(str(kernels / test) for test in RACED)),
            seconds=25,
            needs="compute-sanitizer",
        ),
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a part: how ("passed", "failed", "cut off" or "left out") and why."""

    part: CheckPart
    how: str
    why: str
    seconds: float
    lines: tuple[TableLine, ...]

    @property
    def wrong(self) -> bool:
        return self.how in ("failed", "cut off")


def run_gpu_check(out: str | Path, budget: float, only: Sequence[str] | None = None) -> list[Outcome]:
    """Run the parts (those named in `only`), say how each ended, show the table."""
    root, name = checkout(), gpu()
    if root is None:
        raise UserError("the tests are part of the check: run it from a checkout of the repository")
    if name is None:
        raise UserError("torch sees no CUDA device; run this where there is one")
    slug = re.sub("[^a-z0-9]+", "-", name.partition(",")[0].lower())
    folder = Path(out)
    check_files(folder / f"check-{slug}.jsonl", None)
    deadline, outcomes = time.monotonic() + budget, []
    for part in parts(root):
        if only is not None and part.name not in only:
            continue
        outcome = run_part(part, folder, slug, deadline)
        outcomes.append(outcome)
        console.print(f"{part.name}: {outcome.how}{outcome.why}, {outcome.seconds:.0f} s", soft_wrap=True)
        row = {"bench": "gpu-check", **facts(("triton",)), "part": part.name, "how": outcome.how, "why": outcome.why}
        append_rows(folder / f"check-{slug}.jsonl", row | {"seconds": outcome.seconds})
    show(outcomes, name)
    return outcomes


def run_part(part: CheckPart, folder: Path, slug: str, deadline: float) -> Outcome:
    """Run one part in a process group of its own, which is stopped as a whole."""
    seconds = min(part.seconds, deadline - time.monotonic())
    if part.needs is not None and which(part.needs) is None:
        return Outcome(part, "left out", f" ({part.needs} is not installed)", 0.0, ())
    if seconds < FEWEST_SECONDS:
        return Outcome(part, "left out", " (no time left)", 0.0, ())
    path = None if part.rows is None else folder / f"{part.rows}-{slug}.jsonl"
    before = len(read_rows(path))
    command = [argument.format(out=path) if argument == "{out}" else argument for argument in part.command]
    started = time.monotonic()
    process = subprocess.Popen(command, env=os.environ | dict(part.environment), start_new_session=True)
    try:
        status: int | None = process.wait(seconds)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = tuple(part.lines(read_rows(path)[before:]))
    spent = time.monotonic() - started
    if status is None:
        return Outcome(part, "cut off", f" (after its {seconds:.0f} s)", spent, lines)
    return Outcome(part, "passed" if status == 0 else "failed", "" if status == 0 else f" ({status})", spent, lines)


def show(outcomes: Sequence[Outcome], name: str) -> None:
    """Print the table; a part without figures has a line that says how it ended."""
    lines = [
        line
        for outcome in outcomes
        for line in (outcome.lines or (TableLine(outcome.part.name, f"{outcome.how}{outcome.why}"),))
    ]
    table(
        f"gpu-check on {name}",
        ("", "measured", "predicted", "target", "peer"),
        [(line.what, line.measured, line.predicted, line.target, line.peer) for line in lines],
    )


def failure(outcomes: Sequence[Outcome]) -> str | None:
    """Return a sentence that names the parts that did not pass; None if all did, or were left out."""
    wrong = [f"{outcome.part.name} {outcome.how}{outcome.why}" for outcome in outcomes if outcome.wrong]
    return "; ".join(wrong) or None
