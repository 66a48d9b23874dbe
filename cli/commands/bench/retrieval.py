"""`thresher bench retrieval`: recall, speed and memory of indexes. The measuring is bench/retrieval.py's.

What the flags mean stands there too. Status 1 where our flat index is not exact.
"""

import argparse
import sys
from typing import Any

from thresher.cli import flags
from thresher.common import console

HELP = "indexes, their recall and speed, beside torch, numpy and FAISS; the server under load"
PLACE = 30
EXAMPLE = "thresher bench retrieval --sizes 10000 100000"

SIZES, BATCHES = (10_000, 100_000, 1_000_000), (1, 8, 64, 512)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    count: dict[str, Any] = {"type": flags.count, "metavar": "N"}
    counts: dict[str, Any] = {**count, "nargs": "+"}
    parser.add_argument("--sizes", **counts, default=SIZES, help="of synthetic sets of vectors; default: 10^4 to 10^6")
    parser.add_argument("--dim", **count, default=768, help="of synthetic vectors; default: 768")
    parser.add_argument(
        "--kinds", nargs="*", default=("ivf", "hnsw"), metavar="KIND", help="beside flat; none: flat alone"
    )
    parser.add_argument(
        "--batches", **counts, default=BATCHES, help="queries at a time, up to 512; default: 1 8 64 512"
    )
    parser.add_argument("--corpus", help="real passages that come first, with --encoder")
    parser.add_argument("--encoder", metavar="FOLDER", help="a trained model to encode them")
    parser.add_argument("--questions", metavar="FILE", help="about them; default: runs of their words")
    parser.add_argument("--passages", **count, default=10_000, help="how many of them; default: 10,000")
    parser.add_argument("--work", metavar="FOLDER", help="keep vectors and structures there, and use what it holds")
    parser.add_argument(
        "--server", type=flags.seconds, default=10.0, metavar="SECONDS", help="of load on a server, twice; 0 for none"
    )
    parser.add_argument(
        "--budget",
        type=flags.seconds,
        default=3600.0,
        metavar="SECONDS",
        help="then leave out the rest; default: an hour",
    )
    parser.add_argument("--out", help="JSON lines to append to")
    parser.add_argument("--plot", help="PNG to write")


def run(options: argparse.Namespace) -> None:
    from thresher.bench.retrieval import RetrievalBench, failure, read_source, run_retrieval_bench

    bench = RetrievalBench(
        sizes=options.sizes,
        dim=options.dim,
        kinds=options.kinds,
        batches=options.batches,
        source=read_source(options.corpus, options.encoder, options.passages, options.questions),
        work=options.work,
        server_seconds=options.server,
        budget=options.budget,
    )
    rows = run_retrieval_bench(bench, options.out, options.plot)
    console.answer({"rows": rows})
    wrong = failure(rows)
    if wrong is not None:
        sys.exit(wrong)  # status 1
