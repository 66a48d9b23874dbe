"""The command `bench compile`: what is compiled, the table, and the JSON lines.

The columns of the table: registers a thread; spills, instructions on local memory inside loops + outside; KiB of
shared memory a block; blocks a multiprocessor holds; instructions of prologue, loops and epilogue; ld and st, bytes of
the loads and stores that move most of the bulk; flight, KiB in flight a multiprocessor / what Little's law asks for;
peak, the predicted share, where the kernel declares its work. The JSON lines say more: all that compiler.py, sass.py
and predict.py find, constants, versions.

Another Triton than the installed one is a folder into which its wheel was unpacked, `pip download --no-deps
triton==3.6.0` and `unzip`. The command then runs once more, in a process whose path begins with that folder.

Deliberately absent: speed (it takes a GPU), a second process beside the first (starting one costs what it saves of ten
seconds).
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.table import Table

from thresher.bench.compile.compiler import Result, compile_all
from thresher.bench.compile.predict import Prediction, predict
from thresher.bench.compile.sass import Code
from thresher.bench.compile.target import KIB, TARGETS
from thresher.bench.machine import facts, package_version
from thresher.common.console import answer, console, progress_line, shown
from thresher.common.errors import UserError
from thresher.kernels.registry import Specialisation, specialisations_of, triton_modules

KERNEL_MODULES = triton_modules()


def run_compile_bench(targets: Sequence[str], modules: Sequence[str], out: str | Path | None) -> str | None:
    """Compile all that the `modules` list, print a table, append a JSON line a row to `out`; returns a sentence that
    names what is at fault, None where nothing is."""
    _require_compiler()
    wanted = [
        (name, entry, TARGETS[target])
        for name in modules
        for entry in _listed(name)
        for target in targets
        if TARGETS[target].capability in entry.capabilities
    ]
    compiler, gpus = f"Triton {package_version('triton')}", " and ".join(targets)
    console.print(f"{len(wanted)} compilations for {gpus} with {compiler}; no GPU is asked for")
    with progress_line("compiled", len(wanted)) as line:
        results = compile_all([(specialisation, target) for _, specialisation, target in wanted], line.to)
    _show(results)
    head = facts(("triton",))
    rows = [_row(head, name, result) for (name, _, _), result in zip(wanted, results, strict=True)]
    answer({"rows": rows})
    if out is not None:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        with Path(out).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        console.print(f"appended to {out}")
    wrong = [f"{r.specialisation.name} for {r.target.name} {' and '.join(r.faults)}" for r in results if r.faults]
    return "; ".join(wrong) or None


def run_under(
    triton: str | Path, targets: Sequence[str], modules: Sequence[str], out: str | Path | None, as_json: bool = False
) -> int:
    """The same with the Triton that was unpacked into the folder `triton`; returns the exit status. as_json: its
    answer is ours, and its tables go to stderr."""
    folder = Path(triton).resolve()
    if not (folder / "triton" / "__init__.py").is_file():
        raise UserError(
            f"--triton {triton}: expected a folder into which a wheel of Triton was unpacked, with triton/ in it"
        )
    words = [
        word
        for flag, names in (("--target", targets), ("--module", modules))
        for name in names
        for word in (flag, name)
    ]
    words += [] if out is None else ["--out", str(out)]
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-P", "-m", "thresher.cli", "bench", "compile", *words]
    environment = os.environ | {"PYTHONPATH": path}
    if not as_json:
        return subprocess.run(command, env=environment, check=False).returncode
    done = subprocess.run([*command, "--json"], env=environment, check=False, stdout=subprocess.PIPE)
    answer(json.loads(done.stdout))
    return done.returncode


def _require_compiler() -> None:
    if find_spec("triton") is None:
        raise UserError("Triton is not installed, and `bench compile` is Triton's compiler at work: pip install triton")
    from triton import knobs

    if knobs.runtime.interpret:
        raise UserError(
            f"TRITON_INTERPRET is {os.environ.get('TRITON_INTERPRET')}, under which Triton interprets kernels "
            "and cannot compile them: unset it and run again"
        )


def _listed(name: str) -> tuple[Specialisation, ...]:
    try:
        return specialisations_of(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise UserError(f"--module {name}: there is no such module; expected a dotted name to import") from None
    except ValueError as error:
        raise UserError(f"--module {name}: {error}") from None


def _prediction(result: Result) -> Prediction | None:
    if result.figures is None or result.code is None:
        return None
    return predict(result.specialisation, result.figures, result.code, result.target)


def _row(head: dict[str, Any], module: str, result: Result) -> dict[str, Any]:
    chosen, figures, code = result.specialisation, result.figures, result.code
    prediction = _prediction(result)
    return {
        "bench": "compile",
        **head,
        "module": module,
        "kernel": chosen.name,
        "target": result.target.name,
        "constants": {
            name: value if isinstance(value, int | float) else str(value) for name, value in chosen.constants.items()
        },
        "num_warps": chosen.num_warps,
        "num_stages": chosen.num_stages,
        "maxnreg": chosen.maxnreg,
        "figures": None if figures is None else asdict(figures),
        "code": None if code is None else asdict(code),
        "blocks_per_sm": None if prediction is None else prediction.blocks,
        "prediction": None if prediction is None else asdict(prediction),
        "faults": list(result.faults),
    }


def _commonest(code: Code, what: str) -> int | None:
    """The width by which most of the bulk path's bytes are moved."""
    widths = code.bulk_path(what)
    return max(widths, key=lambda width: width * widths[width]) if widths else None


def _show(results: Sequence[Result]) -> None:
    """Fits 80 characters; a kernel's name wraps, and never the numbers."""
    drawn = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    drawn.add_column("kernel", overflow="fold")
    for name in ("sm", "regs", "spills", "KiB", "blocks", "instructions", "ld", "st", "flight", "peak"):
        drawn.add_column(name, justify="right", no_wrap=True)
    for result in results:
        figures, code, prediction = result.figures, result.code, _prediction(result)
        values: tuple[Any, ...] = (None,) * 9
        if figures is not None and code is not None and prediction is not None:
            share = prediction.share_of_peak
            values = (
                figures.registers,
                f"{code.spills_in_loops}+{code.spills_outside}",
                -(-figures.shared // KIB),
                prediction.blocks,
                f"{code.prologue.instructions} {code.loop.instructions} {code.epilogue.instructions}",
                _commonest(code, "loads"),
                _commonest(code, "stores"),
                f"{prediction.in_flight / KIB:.0f}/{prediction.needed / KIB:.0f}",
                None if share is None else f"{share:.0%}",
            )
        cells = (result.specialisation.name, result.target.capability, *values)
        drawn.add_row(*map(shown, cells), style="bold red" if result.faults else "")
    console.print("spills: inside loops + outside; instructions: prologue, loops, epilogue")
    console.print("ld, st: bytes a thread; flight: KiB on the way per SM / needed; peak: predicted share")
    console.print(drawn)
