"""`thresher index plan`: measure this machine for less than a minute, then print what an index would need and take.

The measuring and the arithmetic are retrieval/building/plan.py's.
"""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from thresher.cli import flags
from thresher.common import console
from thresher.common.errors import UserError

if TYPE_CHECKING:
    from thresher.retrieval.building.plan import IndexPlan
    from thresher.retrieval.encoders import Encoder

HELP = "what an index will need and take, before it is built"
PLACE = 10
EXAMPLE = "thresher index plan --passages 21015324 --dim 768 --memory 16GB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--passages", type=flags.count, required=True, metavar="N", help="how many there will be")
    parser.add_argument("--dim", type=flags.count, metavar="D", help="of a vector; default: the encoder's, else 768")
    parser.add_argument(
        "--kind", action="append", help="as index build has it, or bm25; default: all (of vectors); may be repeated"
    )
    parser.add_argument("--memory", metavar="SIZE", help="such as 16GB; default: this machine's")
    parser.add_argument(
        "--encoder", metavar="DIR", help="a model's folder, or lexical: to time encoding; bm25: as --kind bm25"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="of --encoder; default: cpu")
    parser.add_argument("--sample", type=flags.count, metavar="N", help="vectors to calibrate with; default: 65536")
    parser.add_argument("--disk", default=".", metavar="FOLDER", help="where the index will lie; default: here")
    parser.add_argument("--out", metavar="FILE", help="JSON to write as well")


def run(options: argparse.Namespace) -> None:
    from thresher.common.files import atomic_write_text, show_bytes
    from thresher.common.machine import cpu_memory
    from thresher.retrieval.building.plan import ALL, SAMPLE, WORDS, Calibration, advice, disk_rate, encode_rate, plan
    from thresher.retrieval.indexes.kinds import parse_memory

    if options.encoder == WORDS:  # as `index build` names it: an index without vectors
        options.encoder, options.kind = None, [*(options.kind or []), WORDS]
    words = all(kind == WORDS for kind in options.kind or [ALL])
    _check_flags(options, words)
    memory = cpu_memory()[0] if options.memory is None else parse_memory(options.memory)
    dim, encoded = options.dim or 768, None
    if options.encoder is not None:
        encoder = _encoder(options)
        dim, encoded = options.dim or encoder.dim, encode_rate(encoder)
    calibration = Calibration(dim, options.sample or SAMPLE)
    _announce(calibration.sample, calibration.threads)
    written = disk_rate(options.disk)
    with console.stages() as on_stage:
        plans = plan(options.passages, dim, options.kind or [ALL], memory, calibration, written, on_stage)
    shape = f"{options.passages:,} passages" + ("" if words else f" x {dim}")
    _print_plans(f"{shape}, {show_bytes(memory)} of memory, disk {show_bytes(written)}/s", plans)
    console.console.print(_encoding_note(options, encoded, words, plans), soft_wrap=True)
    advised = advice(options.passages, dim, memory)
    if not words:
        console.console.print(advised[0].upper() + advised[1:] + ".", soft_wrap=True)
    record = {
        "passages": options.passages,
        "dim": dim,
        "memory_bytes": memory,
        "threads": calibration.threads,
        "sample": calibration.sample,
        "disk_bytes_per_second": written,
        "encoded_per_second": encoded,
        "plans": [asdict(row) for row in plans],
        "advice": advised,
    }
    console.answer(record)
    if options.out is not None:
        atomic_write_text(options.out, json.dumps(record, indent=2) + "\n")


def _encoder(options: argparse.Namespace) -> "Encoder":
    from thresher.retrieval.encoders.lexical import DEFAULT_DIM, LexicalEncoder

    if options.encoder != LexicalEncoder.name:
        from thresher.retrieval.encoders.learned import load_encoder

        return load_encoder(options.encoder, device=options.device or "cpu")
    from thresher.retrieval.building.plan import PASSAGE

    if options.device is not None:
        raise UserError("--device is for a model's folder, and the encoder lexical has none; leave it out")
    return LexicalEncoder.fit([PASSAGE], options.dim or DEFAULT_DIM)


def _check_flags(options: argparse.Namespace, words: bool) -> None:
    """UserError for a flag that would do nothing."""
    if options.device is not None and options.encoder is None:
        raise UserError("--device is of --encoder, and none is given; add --encoder DIR, or leave it out")
    if words:
        for flag in ("dim", "encoder", "sample"):
            if getattr(options, flag) is not None:
                raise UserError(f"--{flag} is for vectors, and bm25 counts words; leave it out")


def _announce(sample: int, threads: int) -> None:
    console.console.print(f"Measuring this machine for up to a minute: samples of {sample:,}, {threads} threads.")
    if os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1):
        console.console.print(f"It is busy (load {os.getloadavg()[0]:.1f}), and on a quiet one all times are shorter.")


def _print_plans(title: str, plans: "Sequence[IndexPlan]") -> None:
    from rich import box
    from rich.table import Table

    from thresher.retrieval.building.plan import COLUMNS

    drawn = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for number, column in enumerate(COLUMNS):
        drawn.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in plans:
        drawn.add_row(*row.row())
    console.draw(drawn)
    console.console.print(
        "1 query and 64 together: seconds of the search, at an assumed nprobe or efSearch.", soft_wrap=True
    )


def _encoding_note(
    options: argparse.Namespace, encoded: float | None, words: bool, plans: "Sequence[IndexPlan]"
) -> str:
    """What of the work before the build the table leaves out, and how long both take; `encoded` are passages a
    second."""
    from thresher.retrieval.building.plan import WORDS, show_seconds

    if words:
        return f"BM25 counts words; build it with --encoder {WORDS}."
    if encoded is None:
        return "Encoding comes before the build and is not in it; give --encoder to have it measured."
    first = options.passages / encoded
    in_all = ", ".join(f"{row.kind} {show_seconds(first + row.build_seconds)}" for row in plans if row.kind != WORDS)
    return (
        f"Encoding comes before the build and is not in it: {show_seconds(first)}, at {encoded:,.0f} passages of 100 "
        f"words a second with {options.encoder} on {options.device or 'cpu'}. In all: {in_all}."
    )
