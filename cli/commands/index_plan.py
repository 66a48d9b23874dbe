"""`thresher index plan` and `index hybrid`: their arguments, and what a person sees of them."""

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.table import Table

from thresher.cli import flags
from thresher.engine import console

# Columns of the table, which a file or a pipe has room for.
WIDTH = 120


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    """What `thresher index plan` takes."""
    parser.add_argument("--passages", type=flags.count, required=True, metavar="N")
    parser.add_argument("--dim", type=flags.count, metavar="D", help="of a vector; default: the encoder's, else 768")
    parser.add_argument(
        "--kind", action="append", help="as index build has it, or bm25; default: all (of vectors); may be repeated"
    )
    parser.add_argument("--memory", metavar="SIZE", help="such as 16GB; default: this machine's")
    parser.add_argument("--encoder", metavar="DIR", help="a model's folder, to estimate the time of encoding as well")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the encoder")
    parser.add_argument("--sample", type=flags.count, metavar="N", help="vectors to calibrate with; default: 65536")
    parser.add_argument("--disk", default=".", metavar="FOLDER", help="where the index will lie; default: here")
    parser.add_argument("--out", metavar="FILE", help="JSON to write as well")


def run_plan(options: argparse.Namespace) -> None:
    """Measure this machine for less than a minute, then print what an index would need and take."""
    from thresher.policy.files import atomic_write_text
    from thresher.retrieval.building.calibrate import SAMPLE, Calibration, disk_rate, encode_rate
    from thresher.retrieval.building.plan import ALL, COLUMNS, WORDS, advice, own_memory, plan, show_seconds
    from thresher.retrieval.indexes.kinds import parse_memory, show_bytes

    memory = own_memory() if options.memory is None else parse_memory(options.memory)
    dim, encoded = options.dim or 768, None
    if options.encoder is not None:
        from thresher.retrieval.encoders.learned import load_encoder

        encoder = load_encoder(options.encoder, device=options.device)
        dim, encoded = options.dim or encoder.dim, encode_rate(encoder)
    calibration = Calibration(dim, options.sample or SAMPLE)
    console.console.print(
        f"Measuring this machine for up to a minute: samples of {calibration.sample:,}, {calibration.threads} threads."
    )
    if os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1):
        console.console.print(f"It is busy (load {os.getloadavg()[0]:.1f}), and on a quiet one all times are shorter.")
    if not console.console.is_terminal:
        console.console.width = max(WIDTH, console.console.width)
    written = disk_rate(options.disk)
    plans = plan(options.passages, dim, options.kind or [ALL], memory, calibration, written)
    words = all(row.kind == WORDS for row in plans)
    shape = f"{options.passages:,} passages" + ("" if words else f" x {dim}")
    drawn = Table(
        title=f"{shape}, {show_bytes(memory)} of memory, disk {show_bytes(written)}/s",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for number, column in enumerate(COLUMNS):
        drawn.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in plans:
        drawn.add_row(*row.row())
    console.console.print(drawn)
    console.console.print("1 query and 64 together: seconds of the search; parameter: nprobe or efSearch, assumed.")
    if words:
        console.console.print(f"BM25 counts words; build it with --encoder {WORDS}.")
    elif encoded is None:
        console.console.print("Encoding comes before the build and is not in it; give --encoder to have it measured.")
    else:
        console.console.print(
            f"Encoding comes before the build and is not in it: {show_seconds(options.passages / encoded)}, at "
            f"{encoded:,.0f} passages of 100 words a second with {options.encoder} on {options.device}."
        )
    said = advice(options.passages, dim, memory)
    if not words:
        console.console.print(said[0].upper() + said[1:] + ".")
    if options.out is not None:
        record = {
            "passages": options.passages,
            "dim": dim,
            "memory_bytes": memory,
            "threads": calibration.threads,
            "sample": calibration.sample,
            "disk_bytes_per_second": written,
            "encoded_per_second": encoded,
            "plans": [asdict(row) for row in plans],
            "advice": said,
        }
        atomic_write_text(options.out, json.dumps(record, indent=2) + "\n")


def hybrid_arguments(parser: argparse.ArgumentParser) -> None:
    """What `thresher index hybrid` takes."""
    parser.add_argument("members", nargs="+", metavar="INDEX", help="folders of two or more indexes of one corpus")
    parser.add_argument("--depth", type=flags.count, default=100, help="passages asked of each; default: 100")
    parser.add_argument("--out", required=True)


def run_hybrid(options: argparse.Namespace) -> None:
    """Join indexes into one that is searched as any other."""
    from thresher.retrieval.indexes.hybrid import build_hybrid
    from thresher.retrieval.indexes.load import load_retriever

    hybrid = build_hybrid([Path(member) for member in options.members], options.out, load_retriever, options.depth)
    figures = {
        "index": options.out,
        "members": ", ".join(options.members),
        "passages": len(hybrid),
        "depth": hybrid.depth,
    }
    console.figures(f"hybrid index in {options.out}", figures)
