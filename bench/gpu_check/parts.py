"""What `make gpu-check` runs, in this order, and what of it stands in the table at the end.

Correctness comes first, and a failing test does not stop the rest. A part is a command in a process of its own, with
a limit of its own: a hanging kernel costs that part alone. Benches append their rows to the results folder while they
measure, so what a part had measured when it was cut off is kept.

Tuning comes before the benches and is not captured: it compiles every candidate, and what it finds the others use.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import which
from typing import Any

ROWS = 8192
COLUMNS = 151_665  # of Qwen2.5's tokenizer: what a trainer's head is cut to
LOSS_TARGETS = {1536: 0.61, 2048: 0.63, 3584: 0.66}  # of the floor 6THV, by width
DECODER_TESTS = "tests/engine/decoding/test_decoder_cuda.py"
# What racecheck sees: tests of a few small launches, one for each file of kernels. The tests before it ran them too, so
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
    """A row of the table; what nobody knows is "-"."""

    what: str
    measured: str
    predicted: str = "-"
    target: str = "-"
    peer: str = "-"


Read = Callable[[Sequence[dict[str, Any]]], list[TableLine]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPart:
    """command: arguments, with {out} for its rows' file. seconds: after which it is stopped. lines: of the rows that it
    wrote. needs: a program without which it is left out."""

    name: str
    command: tuple[str, ...]
    seconds: float
    rows: str | None = None
    lines: Read = field(default=lambda rows: [])
    environment: tuple[tuple[str, str], ...] = ()
    needs: str | None = None


def loss_lines(rows: Sequence[dict[str, Any]]) -> list[TableLine]:
    """A line a width: the share of the floor that ours reaches, and the peers' times by ours."""
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
    """A line for the rate of each shape, and one for the host."""
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
    """A line a shape and peer."""
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
    """Two lines a shape: a whole step's tokens a second beside the peer, and what shared prefixes save its update."""
    lines = []
    for row in rows:
        measured = f"{row['shared']['tokens_per_s']['p50']:,.0f} tokens/s"
        peer = "-" if row["ratio_step"] is None else f"TRL {row['ratio_step']:.2f}x"
        lines.append(TableLine(f"step {row['shape']}, {row['tokens']:,} tokens", measured, peer=peer))
        predicted = f"{row['asked_tokens'] / row['computed_tokens']:.2f}x by tokens"
        lines.append(TableLine("  its update, prefixes shared by unshared", f"{row['shared_gain']:.2f}x", predicted))
    return lines


def _thresher(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "thresher.cli", *arguments)


def _tests(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)


def _step() -> CheckPart:
    return CheckPart(
        name="step",
        command=_thresher(
            *("bench", "step", "--device", "cuda", "--shape", "0.5B", "--steps", "2"),
            *("--budget", "35", "--out", "{out}"),
        ),
        seconds=55,
        rows="step",
        lines=step_lines,
    )


def parts(root: Path) -> tuple[CheckPart, ...]:
    """All of them; root: of the checkout. Their limits add up to seven and a half minutes."""
    bits = str(root / "tests" / "kernels" / "test_bits_settings.py")
    case = ("--device", "cuda", "--vocab", str(COLUMNS), "--tokens", str(ROWS), "--density", "100")
    return (
        CheckPart(
            name="tests",
            command=_tests(str(root / "tests" / "kernels"), str(root / DECODER_TESTS), "--ignore", bits),
            seconds=100,
        ),
        CheckPart(
            name="tuning",
            command=_thresher("bench", "loss", *case, "--hidden", "1536", "--peers", "none", "--budget", "50"),
            seconds=85,
            environment=(("THRESHER_AUTOTUNE", "1"),),
        ),
        CheckPart(
            name="loss",
            command=_thresher("bench", "loss", *case, "--hidden", "1536", "3584", "--budget", "40", "--out", "{out}"),
            seconds=60,
            rows="loss",
            lines=loss_lines,
        ),
        CheckPart(
            name="decode",
            command=_thresher(
                *("bench", "decode", "--device", "cuda", "--steps", "32", "--budget", "50", "--out", "{out}")
            ),
            seconds=75,
            rows="decode",
            lines=decode_lines,
        ),
        CheckPart(
            name="rollout",
            command=_thresher(
                *("bench", "rollout", "--device", "cuda", "--shape", "rag", "--rounds", "2"),
                *("--budget", "35", "--out", "{out}"),
            ),
            seconds=50,
            rows="rollout",
            lines=rollout_lines,
        ),
        _step(),
        CheckPart(
            name="racecheck",
            command=(
                "compute-sanitizer",
                "--tool",
                "racecheck",
                "--error-exitcode",
                "1",
                *_tests(*(str(root / "tests" / "kernels" / test) for test in RACED)),
            ),
            seconds=25,
            needs="compute-sanitizer",
        ),
    )


def missing(part: CheckPart) -> bool:
    return part.needs is not None and which(part.needs) is None
