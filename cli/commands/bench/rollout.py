"""`thresher bench rollout`: our rollout beside Hugging Face's. The measuring is bench/rollout.py's."""

import argparse

from thresher.cli import flags
from thresher.common import console

HELP = "sampling, beside transformers' generate and generate_batch"
PLACE = 15
EXAMPLE = "thresher bench rollout --shape demo --rounds 3"

SHAPES = ("demo", "rag", "search", "branches")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=SHAPES, help="default: all of them")
    parser.add_argument(
        "--peer", choices=("hf", "generate_batch", "both", "none"), default="both", help="who is measured beside ours"
    )
    parser.add_argument("--rounds", type=flags.count, default=5, metavar="N", help="of each side; default: 5")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--threads", type=flags.count, metavar="N", help="default: as many as torch takes")
    parser.add_argument(
        "--budget",
        type=flags.seconds,
        default=540.0,
        metavar="SECONDS",
        help="for each shape, then no further round; default: 540",
    )
    parser.add_argument("--out", help="JSON lines to append to")
    parser.add_argument("--plot", help="PNG to write")


def run(options: argparse.Namespace) -> None:
    from thresher.bench.rollout import RolloutBench, run_rollout_bench

    bench = RolloutBench(
        shapes=options.shape,
        peer=options.peer,
        rounds=options.rounds,
        threads=options.threads,
        budget=options.budget,
        device=options.device,
    )
    console.answer({"rows": run_rollout_bench(bench, options.out, options.plot)})
