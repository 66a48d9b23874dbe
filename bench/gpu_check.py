"""`thresher bench gpu-check` (`make gpu-check`): all checks that need a GPU, in eight minutes, as one table.

A part is a command in its own process with its own limit: a failure, or a kernel that hangs, affects only that part.
Benches append their rows while they measure, so the rows of an interrupted part are kept. rollout and step append a row
of ours before a peer is loaded; later rows replace it in the table. Tuning comes before the
benches: it compiles every candidate, and the others use its result. On an H100 with 16 cores all parts together should
take three and a half minutes; the limits are for slower machines.

    check-GPU.txt         the table, rewritten after each part
    check-GPU.jsonl       one row per part
    check-GPU-PART.log    the output of the part; the terminal gets its failed tests, and its last lines if it failed
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

from thresher.bench.harness import append_rows, check_files, facts, read_rows, resolve_device
from thresher.common.console import console
from thresher.common.errors import UserError
from thresher.common.files import atomic_write_text
from thresher.common.machine import gpu

ROOT = Path(__file__).resolve().parent.parent
FEWEST_SECONDS = 5.0  # with less time left, a part is not started
GRACE = 5.0  # seconds between SIGINT and SIGKILL
LAST_LINES = 12  # of the log of a failed part
MOST_WORKERS = 14  # test processes; each has its own CUDA context
COUNTED = re.compile(r"^[= ]*((?:\d+ [a-z]+(?:, )?)+) in [\d.]+s", re.MULTILINE)  # pytest's last line
ROWS = 8192
COLUMNS = 151_665  # columns of Qwen2.5's tokenizer, to which trainers cut the head
LOSS_TARGETS = {1536: 0.61, 2048: 0.63, 3584: 0.66}  # share of the floor 6THV, by width
DECODER_TESTS = "tests/engine/decoding/test_decoder_cuda.py"
# Tests of kernels/ that do not depend on the GPU.
OF_A_CPU = ("bits_settings", "interpreter_proofs", "paged_attention", "draw_in_blocks", "noise", "tiles")
# Under racecheck: tests with a few small launches, one for each file of kernels. The tests before have run them, so
# that Triton has their binaries. The test of the loss runs the head and its reduction.
RACED = (
    "test_coefficients_triton.py::test_the_head_gradient_is_added_to_a_buffer",
    "test_coefficients_triton.py::test_probabilities_that_underflow_add_nothing_to_the_entropys_gradient",
    "attention/test_decode_triton.py::test_a_draft_whose_part_holds_only_later_keys_adds_nothing",
    "attention/test_cascade_triton.py::test_a_prefix_is_read_once_and_not_by_its_members",
    "attention/test_prefill_triton.py::test_longest_may_be_more_than_any_run_and_queries_a_view",
    "attention/test_forest_triton.py::test_any_strides_are_read",
    "delta/test_rule_triton.py::test_strides_are_read",
    "delta/test_rule_triton.py::test_keys_that_are_all_alike",
    "delta/test_layer_triton.py::test_more_channels_than_a_program_has",
    "delta/test_steps_triton.py::test_rows_of_drafts_and_a_place_of_nobody",
    "test_sampling_triton.py::test_one_temperature_for_all_rows_is_not_copied",
    "test_norm_triton.py::test_a_frozen_weight_has_no_sums",
    "test_heads_triton.py::test_weights_gradients_are_sums_of_several_programs",
    "test_gate_triton.py::test_strides_and_broadcast_gradients",
    "test_rope_triton.py::test_a_row_of_nans_stays_in_its_place",
)


@dataclass(frozen=True, slots=True)
class TableLine:
    """A row of the table; "-" for an unknown figure."""

    what: str
    measured: str
    predicted: str = "-"
    target: str = "-"
    peer: str = "-"


NOT_PREDICTED = TableLine("  not predicted: the host bounds it", "", "", "", "")  # under the rollouts
Read = Callable[[Sequence[dict[str, Any]]], list[TableLine]]


@dataclass(frozen=True, slots=True)
class CheckPart:
    """A part. command: arguments, with {out} for the file of its rows. seconds: its limit. rows: prefix of that file's
    name. lines: makes table lines of the rows. needs: programs and modules without which the part is left out."""

    name: str
    command: tuple[str, ...]
    seconds: float
    rows: str | None = None
    lines: Read = field(default=lambda rows: [])
    environment: tuple[tuple[str, str], ...] = ()
    needs: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """Return the requirements that this machine lacks."""
        return [name for name in self.needs if which(name) is None and find_spec(name) is None]


def smoke_lines(rows: Sequence[dict[str, Any]]) -> list[TableLine]:
    """Return a line for each step of the run, and one with the seconds of its commands."""
    lines = []
    for row in rows:
        for number, step in enumerate(row["steps"], 1):
            rates = f"{step['rollout_tokens_per_s']:,.0f} sampled, {step['update_tokens_per_s']:,.0f} trained tokens/s"
            more = f"log-prob gap {step['logprob_gap_max']:.1e}, {step['search_queries']} searches"
            lines.append(TableLine(f"  step {number}", f"{rates}, {more}"))
        spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in row["seconds"].items())
        lines.append(TableLine("  its commands", spent))
    return lines


def loss_lines(rows: Sequence[dict[str, Any]]) -> list[TableLine]:
    """Return a line for each width: the share of the floor that ours reaches, and the peers' times / ours."""
    lines = []
    for row in (row for row in rows if "shape" in row):  # the others say what was left out
        hidden = row["shape"]["hidden"]
        target = f"{LOSS_TARGETS[hidden]:.0%} of the floor" if hidden in LOSS_TARGETS else "-"
        for name, found in row["ours"].items():
            peers = [f"{peer} {ratio['p50']:.2f}x" for peer, ratio in row["ratio"].get(name, {}).items()]
            share = found.get("share", {}).get("nominal")
            measured = found.get("left_out") or ("-" if share is None else f"{share:.0%} of the floor")
            lines.append(TableLine(f"loss, H {hidden:,}", measured, "-", target, ", ".join(peers) or "-"))
    return lines


def attention_lines(rows: Sequence[dict[str, Any]]) -> list[TableLine]:
    """Return a line for each model: the share of the floor that ours reaches, and the peers' times / ours."""
    from thresher.engine.planning.time import UPDATE_SHARES  # with much of the engine, which the check does not need

    lines = []
    for row in rows:
        ours = row["sides"]["ours"]
        measured = ours["left_out"] or f"{ours['ms']['p50']:.2f} ms"
        if ours["left_out"] is None and row["floor_ms"] is not None:
            measured += f", {row['floor_ms'] / ours['ms']['p50']:.0%} of the floor"
        peers = ", ".join(f"{peer} {ratio['p50']:.2f}x" for peer, ratio in row["ratio"].items())
        target = f"{UPDATE_SHARES['attention']:.0%} of the floor"
        lines.append(TableLine(f"attention, heads of {row['model']}", measured, "-", target, peers or "-"))
    return lines


def decode_lines(rows: Sequence[dict[str, Any]]) -> list[TableLine]:
    """Return a line for the rate of each shape, and one for the host."""
    from thresher.bench.roofline import context_text
    from thresher.engine.planning.time import DecodeShape

    lines = []
    for row in rows:
        shape, share = row["shape"], row["floor_share"]
        measured = f"{row['tokens_per_s']:,.0f} tokens/s"
        predicted = wanted = "-"
        if row["floor_s"] is not None:
            wanted = f"{row['predicted_share']:.0%} of the floor"
            measured += f", {share:.0%}"
            predicted = f"{row['predicted_share'] * shape['batch'] / row['floor_s']:,.0f} tokens/s"
        what = f"decode {row['model']}, context {context_text(DecodeShape(**shape))}"
        lines.append(TableLine(what, measured, predicted, wanted))
        host = f"{1e3 * row['host_s']:.2f} ms"
        lines.append(TableLine(f"  the host's part of a step, {row['model']}", host, "-", ".5 ms"))
    return lines


def rollout_lines(rows: Sequence[dict[str, Any]]) -> list[TableLine]:
    """Return a line for each shape and peer; for a shape without rows of peers, one of ours. The last is a note on the
    missing prediction: so small a model reaches 1 to 3% of its floor, because launches and the host take the time."""
    lines, beside = [], {(row["shape"], row["tokens"]) for row in rows if row["peer"] is not None}
    for row in rows:
        if row["peer"] is None and (row["shape"], row["tokens"]) in beside:
            continue  # ours, from before the peers ran
        what, measured = f"rollout {row['shape']}, {row['tokens']} tokens", row["ours_tokens_per_s"]["p50"]
        target = "3x generate_batch" if row["peer"] == "generate_batch" else "-"
        peer = f"{row['peer']} {row['ratio']['p50']:.2f}x" if row["ratio"] else row.get("peer_failure") or "-"
        lines.append(TableLine(what, f"{measured:,.0f} tokens/s", "-", target, peer))
    return [*lines, NOT_PREDICTED] if lines else []


def step_lines(rows: Sequence[dict[str, Any]]) -> list[TableLine]:
    """Return the lines of each shape's last row. They have tokens per second of a step compared with the peer, the
    seconds of rollout and update, the gain by shared prefixes, and the share of the update in which the GPU is busy.
    Predictions are of this machine's GPU; a known GPU and a known model have some."""
    from thresher.bench.roofline import MODELS, config_of, predicted_step
    from thresher.engine.planning.time import this_chip

    lines, chip = [], this_chip(resolve_device(None))
    for row in {row["shape"]: row for row in rows}.values():
        shared, gain = row["shared"], f"{row['asked_tokens'] / row['computed_tokens']:.2f}x by tokens"
        whole = rollout = update = "-"
        if chip is not None and row["shape"] in MODELS:
            seconds = predicted_step(config_of(row["shape"]), chip)
            whole = f"{row['tokens'] / (seconds['rollout'] + seconds['update']):,.0f} tokens/s"
            rollout, update = f"{seconds['rollout']:.2f} s", f"{seconds['update']:.2f} s"
            gain = f"{seconds['unshared'] / seconds['update']:.2f}x, {gain}"
        measured = f"{shared['tokens_per_s']['p50']:,.0f} tokens/s"
        peer = row.get("peer_failure") or "-" if row["ratio_step"] is None else f"TRL {row['ratio_step']:.2f}x"
        lines.append(TableLine(f"step {row['shape']}, {row['tokens']:,} tokens", measured, whole, peer=peer))
        lines.append(TableLine("  its rollout", f"{shared['rollout_s']['p50']:.2f} s", rollout))
        lines.append(TableLine("  its update, prefixes shared", f"{shared['update_s']['p50']:.2f} s", update))
        lines.append(TableLine("  its update, prefixes shared / unshared", f"{row['shared_gain']:.2f}x", gain))
        if profiled := row.get("update_profile"):
            whole = row["shared"]["update_s"]["p50"]
            busy = f"{profiled['kernels']:,} kernels, {profiled['busy_s']:.2f} of {whole:.2f} s"
            lines.append(TableLine("  its update's kernels, prefixes shared", busy))
    return lines


def parts() -> tuple[CheckPart, ...]:
    """Return all parts, in their order."""
    kernels = ROOT / "tests" / "kernels"
    tests = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "thresher.bench.gpu_tests")
    ignored = (f"--ignore={kernels / f'test_{name}.py'}" for name in OF_A_CPU)
    workers = min(max(len(os.sched_getaffinity(0)) - 2, 1), MOST_WORKERS)
    spread = ("-n", str(workers), "--dist", "worksteal") if find_spec("xdist") else ()
    bench = (sys.executable, "-m", "thresher.cli", "bench")
    cuda = ("--device", "cuda")
    loss = ("loss", *cuda, "--vocab", str(COLUMNS), "--tokens", str(ROWS), "--density", "100")
    racecheck = ("compute-sanitizer", "--tool", "racecheck", "--error-exitcode", "1")

    def measured(
        name: str, lines: Read, seconds: float, budget: int, *options: str, needs: tuple[str, ...] = ()
    ) -> CheckPart:
        command = (*bench, *(loss if name == "loss" else (name, *cuda)), *options, "--budget", str(budget))
        command = (*command, "--out", "{out}")
        return CheckPart(name=name, command=command, seconds=seconds, rows=name, lines=lines, needs=needs)

    alone = () if find_spec("transformers") else ("--peer", "none")
    smoke = (sys.executable, "-m", "thresher.bench.gpu_smoke", "{out}")
    texts = ("tokenizers", "urllib3")  # for rollouts of texts, with their tools
    training = (*texts, "safetensors")
    of_decoder = (str(ROOT / DECODER_TESTS),) if find_spec("tokenizers") else ()
    files = (*ignored, str(kernels), *of_decoder)
    return (
        CheckPart("smoke", smoke, 65, rows="smoke", lines=smoke_lines, needs=(*training, "jinja2")),
        CheckPart(
            name="tests",
            command=(*tests, "-m", "not slow", "--tb=short", *spread, *files),
            seconds=110,
            needs=("pytest", "hypothesis"),
        ),
        CheckPart(
            name="tuning",
            command=(*bench, *loss, "--hidden", "1536", "--peers", "none", "--budget", "25", "--out", "{out}"),
            seconds=30,
            rows="tuning",
            lines=loss_lines,
            environment=(("THRESHER_AUTOTUNE", "1"),),
        ),
        measured("loss", loss_lines, 40, 20, "--hidden", "1536", "3584"),
        measured("attention", attention_lines, 42, 30, "--model", "0.5B", "7B", "--rounds", "10"),
        measured("decode", decode_lines, 30, 25, "--steps", "32"),
        measured("rollout", rollout_lines, 40, 15, "--shape", "rag", "--rounds", "2", *alone, needs=texts),
        measured(
            "step", step_lines, 48, 20, "--shape", "0.5B", "--steps", "2", "--profile", "{out}.kernels", needs=training
        ),
        CheckPart(
            name="racecheck",
            command=(*racecheck, *tests, *(str(kernels / test) for test in RACED)),
            seconds=45,
            needs=("compute-sanitizer", "pytest", "hypothesis"),
        ),
    )


def named_parts(names: Sequence[str] | None) -> list[CheckPart]:
    """Return the parts with these names; None: all. A name may be a comma-separated list. UserError for an unknown
    name."""
    known = {part.name: part for part in parts()}
    if names is None:
        return list(known.values())
    wanted = [name for several in names for name in several.split(",") if name]
    for name in wanted:
        if name not in known:
            raise UserError(f"--parts {name}: there is no such part; expected some of {', '.join(known)}")
    if not wanted:
        raise UserError(f"--parts: names no part; expected some of {', '.join(known)}")
    return [part for name, part in known.items() if name in wanted]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a part: how it ended ("passed", "failed", "cut off" or "left out") and why. counted: pytest's
    counts."""

    part: CheckPart
    how: str
    why: str = ""
    seconds: float = 0.0
    lines: tuple[TableLine, ...] = ()
    counted: str = ""

    @property
    def wrong(self) -> bool:
        return self.how in ("failed", "cut off")

    @property
    def said(self) -> str:
        took = f", {self.seconds:.0f} s" if self.seconds else ""
        return f"{self.how}{self.why}{took}" + (f": {self.counted}" if self.counted else "")


def run_gpu_check(out: str | Path, budget: float, only: Sequence[str] | None = None) -> list[Outcome]:
    """Run the parts (those named in `only`), report how each ended, print the table."""
    wanted, name = named_parts(only), gpu()
    if not (ROOT / "tests" / "kernels").is_dir():
        raise UserError("the tests are part of the check: run it from a checkout of the repository")
    if name is None:
        raise UserError("torch sees no CUDA device; run this where there is one")
    slug = re.sub("[^a-z0-9]+", "-", name.partition(",")[0].lower())
    folder = Path(out).resolve()
    check_files(folder / f"check-{slug}.jsonl", None)
    deadline, outcomes = time.monotonic() + budget, []
    for part in wanted:
        console.print(f"{part.name} ..", soft_wrap=True)
        outcome = run_part(part, folder, slug, deadline)
        outcomes.append(outcome)
        console.print(f"{part.name}: {outcome.said}", soft_wrap=True)
        row = {"bench": "gpu-check", **facts(("triton",)), "part": part.name, "how": outcome.how, "why": outcome.why}
        row |= {"seconds": outcome.seconds, "counted": outcome.counted}
        append_rows(folder / f"check-{slug}.jsonl", row)
        atomic_write_text(folder / f"check-{slug}.txt", table_text(outcomes, name))
    console.print(table_text(outcomes, name), soft_wrap=True)
    return outcomes


def run_part(part: CheckPart, folder: Path, slug: str, deadline: float) -> Outcome:
    """Run one part in its own process group, which is stopped as a whole."""
    seconds = min(part.seconds, deadline - GRACE - time.monotonic())
    if missing := part.missing():
        return Outcome(part, "left out", f" ({', '.join(missing)} not installed)")
    if seconds < FEWEST_SECONDS:
        return Outcome(part, "left out", " (no time left)")
    path = None if part.rows is None else folder / f"{part.rows}-{slug}.jsonl"
    log = folder / f"check-{slug}-{part.name}.log"
    before = len(read_rows(path))
    command = [argument.replace("{out}", str(path)) for argument in part.command]
    environment = os.environ | {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"} | dict(part.environment)
    started = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore SIGINT
        )
    try:
        follow(process, log, started + seconds)
        cut_off = process.poll() is None
    finally:
        stop(process)
    text = log.read_text(encoding="utf-8", errors="replace")
    counts = COUNTED.findall(text)
    found = tuple(part.lines(read_rows(path)[before:])), counts[-1] if counts else ""
    spent = time.monotonic() - started
    if not cut_off and process.returncode == 0:
        return Outcome(part, "passed", "", spent, *found)
    for line in text.splitlines()[-LAST_LINES:]:
        console.print(f"  | {line[:200]}", soft_wrap=True)
    if cut_off:
        return Outcome(part, "cut off", f" (after its {seconds:.0f} s)", spent, *found)
    return Outcome(part, "failed", f" ({process.returncode})", spent, *found)


def follow(process: subprocess.Popen[bytes], log: Path, deadline: float) -> None:
    """Wait for the process, at most until `deadline`; print lines of its log that name failed tests."""
    rest = ""
    with log.open(encoding="utf-8", errors="replace") as lines:
        while True:
            over = process.poll() is not None or time.monotonic() > deadline
            *whole, rest = (rest + lines.read()).split("\n")
            for line in whole:
                if line.startswith("FAILED ") and ": " in line:
                    console.print(f"  {line[:300]}", soft_wrap=True)
            if over:
                return
            time.sleep(0.1)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a running process and its group: by SIGINT, and GRACE seconds later by SIGKILL."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its remaining children


def table_text(outcomes: Sequence[Outcome], name: str) -> str:
    """Return the table: for each part a line with its result, then the lines of its figures."""
    rows = [TableLine("", "measured", "predicted", "target", "peer")]
    for outcome in outcomes:
        rows += [TableLine(outcome.part.name, outcome.said, "", "", ""), *outcome.lines]
    cells = [(row.what, row.measured, row.predicted, row.target, row.peer) for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells)
    return "\n".join([f"gpu-check on {name}", *lines]) + "\n"


def failure(outcomes: Sequence[Outcome]) -> str | None:
    """Return a sentence that names the parts that failed; None if all passed or were left out."""
    wrong = [f"{outcome.part.name} {outcome.how}{outcome.why}" for outcome in outcomes if outcome.wrong]
    return "; ".join(wrong) or None
