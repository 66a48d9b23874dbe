"""The harness of all benches: the head of a row, time and memory of a call, bare rates of a machine, output files.

Launch costs are not subtracted: a call is timed as it occurs in a training step, from an idle device until it is done.
"""

import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import profile

from thresher.common.console import console
from thresher.common.errors import UserError
from thresher.common.machine import origin
from thresher.common.records import finite

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MIB = 2**20
COPIED_BYTES, REPEATS = 2**27, 7  # for the bare rates
MATMUL = {"cpu": 1024, "cuda": 8192}  # rows and columns; a smaller product leaves multiprocessors of a GPU idle
ITEM = 4  # bytes of a float32


def facts(packages: Sequence[str] = ()) -> dict[str, Any]:
    """Return the head of a row: its origin, torch's threads, and the versions of `packages` (None: not installed)."""
    found = origin(cuda=True)
    del found["host"]  # rows are published
    return {
        **found,
        "threads": torch.get_num_threads(),
        **{package: package_version(package) for package in packages},
    }


def hardware(row: Mapping[str, Any]) -> str:
    """Return the GPU on which a row was measured, else the machine. Older rows have no device."""
    measured_on_gpu = row["device"] == "cuda" if "device" in row else row.get("gpu") is not None
    return str(row["gpu"] if measured_on_gpu else row["machine"])


def package_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def reason_of(error: Exception) -> str:
    """Return an error's type and text in one line, shortened if long."""
    return f"{type(error).__name__}: {(' '.join(str(error).split()) or 'no message')[:200]}"


def resolve_device(name: str | None) -> torch.device:
    """Return the device with this name; for None CUDA if available, else the CPU. UserError if it is missing."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"--device cuda: torch {torch.__version__} sees no CUDA device; run where there is one, or give cpu"
        )
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def resolve_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """Return the dtype with this name; for None bfloat16 on CUDA, else float32."""
    return DTYPES[name or ("bfloat16" if device.type == "cuda" else "float32")]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def wait(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(run: Callable[[], Any], device: torch.device) -> float:
    """Time one call in ms: by events around it on CUDA, by the wall clock otherwise."""
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - started)
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    before.record()
    run()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after))


def in_turn(
    runs: Sequence[Callable[[], Any]], rounds: int, device: torch.device, between: Callable[[], Any]
) -> list[list[float]]:
    """Return `rounds` times of each call, in ms. The calls alternate, so that other load on the machine affects all.

    Each round starts one call later, so that no call always follows the same one. `between` runs before each call,
    untimed.
    """
    times: list[list[float]] = [[] for _ in runs]
    for first in range(rounds):
        for place in range(len(runs)):
            turn = (first + place) % len(runs)
            between()
            times[turn].append(milliseconds(runs[turn], device))
    return times


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """Return the peak bytes of torch's allocator during the call, beyond those in use before.

    On a CPU it is summed from the profiler's record of every allocation and release. Memory that a BLAS library
    allocates itself is counted on neither device.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler prints its start and end
    with profile(profile_memory=True) as recorded:
        run()
    assert recorded.kineto_results is not None
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    held = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


def profile_kernels(run: Callable[[], Any], device: torch.device, path: str | Path, title: str) -> tuple[int, float]:
    """Append the time of each kernel (on a CPU, of each operation) within the call to a file. Return their number and
    their seconds together."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler prints its start and end
    with torch.profiler.profile(acc_events=True) as recorded:
        run()
        wait(device)
    time_of = attrgetter("self_cpu_time_total" if device.type == "cpu" else "self_device_time_total")
    kernels = [each for each in recorded.key_averages() if each.device_type.name.lower() == device.type]
    lines = [f"{time_of(x):10.0f} us {x.count:6d} calls  {x.key}\n" for x in sorted(kernels, key=time_of, reverse=True)]
    with Path(path).open("a", encoding="utf-8") as file:
        file.writelines([f"{title}\n", *lines])
    return sum(x.count for x in kernels), sum(map(time_of, kernels)) / 1e6


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return p20, p50 and p80, interpolated."""
    cuts = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
    return {"p20": cuts[1], "p50": cuts[4], "p80": cuts[7]}


def ratios(theirs: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    """Return the spread of a peer's times / ours, of neighbouring calls."""
    return spread([b / a for a, b in zip(ours, theirs, strict=True)])


def spread_text(values: dict[str, float] | None) -> str:
    """Return the median with p20 and p80 in brackets; "-" for None."""
    if values is None:
        return "-"
    p20, p50, p80 = (f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values.values())
    return f"{p50} ({p20} to {p80})"


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes read and written per second by a copy, and operations per second by a matmul: the best of a few."""

    bytes_per_s: float
    flops_per_s: float


def measure_rates(device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Rates:
    """Measure a device, the CPU for None; `dtype` is that of the matmul. Takes about a second, with torch's current
    number of threads."""
    device = device or torch.device("cpu")
    size = MATMUL[device.type]
    source = torch.ones(COPIED_BYTES // ITEM, device=device)
    target = torch.empty_like(source)
    left, right = torch.randn(2, size, size, device=device).to(dtype)
    product = torch.empty(size, size, device=device, dtype=dtype)

    def best(run: Callable[[], object]) -> float:
        return min(milliseconds(run, device) for _ in range(REPEATS)) / 1e3

    copied = best(lambda: target.copy_(source))
    multiplied = best(lambda: torch.mm(left, right, out=product))
    return Rates(2 * COPIED_BYTES / copied, 2 * size**3 / multiplied)


def read_rows(path: str | Path | None) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines, without an incomplete line; none for None or a missing file."""
    rows = []
    for line in (
        Path(path).read_text(encoding="utf-8").splitlines() if path is not None and Path(path).is_file() else ()
    ):
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def append_rows(path: str | Path | None, *rows: dict[str, Any]) -> None:
    """Append JSON lines to `path`, with null for numbers that are not finite; do nothing for None."""
    if path is not None:
        with Path(path).open("ab+") as file:
            if file.tell() and (file.seek(-1, os.SEEK_END), file.read())[1] != b"\n":
                file.write(b"\n")  # behind an incomplete line
        with Path(path).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(finite(row), allow_nan=False) + "\n" for row in rows)


def print_files(out: str | Path | None, plot: str | Path | None = None) -> None:
    """Print the paths of rows and picture, if they are not None."""
    for what, path in (("appended to", out), ("drawn in", plot)):
        if path is not None:
            console.print(f"{what} {path}", soft_wrap=True)


def check_files(out: str | Path | None, plot: str | Path | None, profile: str | Path | None = None) -> None:
    """Create the folders of these files, before an hour of measuring.

    Raises UserError if a file cannot be written, or for a picture without matplotlib.
    """
    if plot is not None and find_spec("matplotlib") is None:
        raise UserError(f"--plot {plot}: matplotlib is not installed; install it, or leave --plot out")
    for flag, path in (("--out", out), ("--plot", plot), ("--profile", profile)):
        if path is None:
            continue
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            if flag != "--plot":
                append_rows(path)
            elif Path(path).is_dir():
                raise IsADirectoryError(0, "it is a folder")
        except OSError as error:
            raise UserError(f"{flag} {path}: cannot be written ({error.strerror}); choose another file") from None
