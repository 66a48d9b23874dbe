"""`thresher index build`, `search` and `check`: their flags, and what a person sees while they run.

The work is `retrieval/building/commands.py`'s. Deliberately absent: imports of it at the top, since the command line
is read, and its help printed, without FAISS.
"""

import argparse
import json

from thresher.cli import flags
from thresher.engine import console
from thresher.engine.config.recipe import parse_overrides

# Settings of a trained encoder that may be given in the place of what its folder says.
MODEL_OPTIONS = {
    "pooling": "mean or cls",
    "query_prefix": "text before every query",
    "passage_prefix": "text before every passage",
    "max_length": "tokens of a text",
    "device": "cpu or cuda",
}


def build_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--encoder", default="lexical", help="lexical (hashed words), bm25, or a model's folder")
    parser.add_argument("--embed", default="text", choices=("text", "title+text"))
    parser.add_argument("--kind", help="flat (the default), flat16, ivf, ivfpq, hnsw, or such as IVF4096,Flat")
    parser.add_argument("--memory", metavar="SIZE", help="such as 16GB: pick the kind that fits, and say why")
    parser.add_argument("--recall", type=float, default=0.95, help="what an approximate kind should find; default .95")
    parser.add_argument("--keep", default="float32", help="vectors for exact scores: float32, float16 or none")
    parser.add_argument("--dim", type=flags.count, default=2048, help="of the lexical encoder")
    for name, text in MODEL_OPTIONS.items():
        kind = flags.count if name == "max_length" else str
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=f"of a model, {text}")
    parser.add_argument("--chunk-words", type=flags.count, default=0, help="cut passages into this many words")
    parser.add_argument("--skip-empty", action="store_true", help="leave out records without text")
    parser.add_argument("--out", required=True)


def search_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `search` and of `check`."""
    parser.add_argument("--index", required=True)
    parser.add_argument("--queries", required=True)
    parser.add_argument("--k", type=flags.count, default=5)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="such as nprobe=64")
    parser.add_argument("--gpu", action="store_true", help="lists on all GPUs, in float16")


def run_build(options: argparse.Namespace) -> None:
    from thresher.retrieval.building.commands import build

    model = {name: getattr(options, name) for name in MODEL_OPTIONS if getattr(options, name) is not None}
    with console.stages() as on_stage:
        figures = build(
            options.corpus,
            options.out,
            options.encoder,
            options.embed,
            options.dim,
            kind=options.kind,
            memory=options.memory,
            recall=options.recall,
            keep=options.keep,
            encoder_options=model,
            chunk_words=options.chunk_words,
            skip_empty=options.skip_empty,
            on_stage=on_stage,
        )
    console.figures(f"index in {options.out}", figures)


def run_search(options: argparse.Namespace) -> None:
    from thresher.retrieval.building.commands import search_file

    parameters = parse_overrides(options.set)
    figures = search_file(options.index, options.queries, options.k, options.out, parameters, options.gpu)
    console.figures(f"hits in {options.out}", figures)


def run_check(options: argparse.Namespace) -> None:
    from thresher.retrieval.building.commands import check

    figures = check(options.index, options.queries, options.k, parse_overrides(options.set), options.gpu)
    console.figures(f"{options.index} against the gold titles of {options.queries}", figures)
    print(json.dumps(figures))
