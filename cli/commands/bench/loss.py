"""`thresher bench loss`: the loss kernel, timed and checked. The measuring is bench/loss.py's.

Status 1 where our own loss is wrong or fails, and so could not be timed.
"""

import argparse
import sys

from thresher.cli import flags
from thresher.common import console

HELP = "the loss's forward and backward, beside peers and its matmuls' floor"
PLACE = 20
EXAMPLE = "thresher bench loss --device cpu --peers none"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on cuda, else float32")
    for axis, text in (("hidden", "widths"), ("vocab", "vocabulary sizes"), ("tokens", "tokens, masked ones included")):
        parser.add_argument(f"--{axis}", type=flags.count, nargs="+", metavar="N", help=f"{text}; default: by device")
    parser.add_argument("--density", type=flags.percent, nargs="+", metavar="PERCENT", help="shares of unmasked tokens")
    parser.add_argument("--peers", default="all", metavar="NAMES", help="all, none, or names with commas between them")
    parser.add_argument("--chunk-rows", type=flags.count, help="of ours, and of the chunked naive implementation")
    parser.add_argument(
        "--budget", type=flags.seconds, default=float("inf"), metavar="SECONDS", help="then leave out the rest"
    )
    parser.add_argument("--out", help="JSON lines to append to")
    parser.add_argument("--plot", help="PNG to write")


def run(options: argparse.Namespace) -> None:
    from thresher.bench.loss import LossBench, failure, read_peers, run_loss_bench

    bench = LossBench(
        device=options.device,
        dtype=options.dtype,
        hidden=options.hidden,
        vocab=options.vocab,
        tokens=options.tokens,
        density=options.density,
        peers=read_peers(options.peers),
        chunk_rows=options.chunk_rows,
        budget=options.budget,
    )
    rows = run_loss_bench(bench, options.out, options.plot)
    console.answer({"rows": rows})
    wrong = failure(rows)
    if wrong is not None:
        sys.exit(wrong)  # status 1
