"""`thresher bench decode`: whole decode steps at real sizes. The measuring is bench/decode.py's."""

import argparse

from thresher.cli import flags
from thresher.common import console

HELP = "decode steps of Qwen2.5's sizes, beside their floor and what was predicted"
PLACE = 17
EXAMPLE = "thresher bench decode --model 0.5B --batch 8"

MODELS = ("0.5B", "1.5B", "3B", "7B")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", nargs="+", choices=MODELS, default=("0.5B", "1.5B", "7B"), help="sizes of Qwen2.5")
    parser.add_argument("--batch", type=flags.count, default=256, metavar="N", help="sequences; default: 256")
    parser.add_argument("--own", type=flags.count, default=300, metavar="N", help="positions of each; default: 300")
    parser.add_argument(
        "--shared", type=flags.count, default=1200, metavar="N", help="positions that a group shares; default: 1,200"
    )
    parser.add_argument("--steps", type=flags.count, default=64, metavar="N", help="on the clock; default: 64")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on cuda, else float32")
    parser.add_argument(
        "--budget", type=flags.seconds, default=float("inf"), metavar="SECONDS", help="then leave out the rest"
    )
    parser.add_argument("--out", help="JSON lines to append to")


def run(options: argparse.Namespace) -> None:
    from thresher.bench.decode import DecodeBench, run_decode_bench

    bench = DecodeBench(
        models=options.model,
        batch=options.batch,
        own=options.own,
        shared=options.shared,
        steps=options.steps,
        device=options.device,
        dtype=options.dtype,
        budget=options.budget,
    )
    console.answer({"rows": run_decode_bench(bench, options.out)})
