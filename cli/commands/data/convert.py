"""`thresher data convert`: published question sets into one file, with a word now and then on how far it is.

The work is retrieval/datasets/convert.py's.
"""

import argparse
from pathlib import Path
from typing import Any

from thresher.cli import flags
from thresher.common import console
from thresher.common.errors import UserError

HELP = "published question sets into one file of questions"
PLACE = 10
EXAMPLE = "thresher data convert --in hotpot_train.json --limit 1000 --out train.jsonl --corpus corpus.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", default="auto", help="of the files; auto (the default) looks at each, and says")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--in", dest="files", nargs="+", metavar="FILE", help="one question set, in one file or several"
    )
    source.add_argument(
        "--mix",
        nargs="+",
        metavar="NAME=FILE:COUNT",
        help="several sets, and how many questions of each (default: all)",
    )
    parser.add_argument("--limit", type=flags.count, metavar="N", help="with --in: how many questions")
    parser.add_argument(
        "--seed", type=flags.integer, help="draw them at random and shuffle; without: the first ones, in order"
    )
    parser.add_argument("--aliases", metavar="FILE", help="2Wiki's id_aliases.json: further gold answers")
    parser.add_argument(
        "--corpus", metavar="FILE", help="write their passages too, each once, for thresher index build"
    )
    parser.add_argument(
        "--passages",
        type=flags.natural,
        metavar="N",
        help="keep the first N of a question's passages; 0 for questions that passages are looked up for; default: all",
    )
    parser.add_argument("--skipped", metavar="FILE", help="write which records were left out, and why")
    parser.add_argument("--out", required=True, metavar="FILE", help="JSONL to write, gzipped if named .gz")


def run(options: argparse.Namespace) -> None:
    from thresher.retrieval.datasets.convert import MixSource, convert, parse_mix

    if options.mix and options.limit is not None:
        raise UserError("--limit is for --in; with --mix, put a count behind each file, such as NAME=FILE:1000")
    if options.mix:
        sources = [parse_mix(text) for text in options.mix]
    else:
        sources = [MixSource(paths=tuple(map(Path, options.files)), count=options.limit)]
    with console.counting("records read:") as counter:
        figures = convert(
            sources,
            options.out,
            fmt=options.format,
            seed=options.seed,
            aliases=options.aliases,
            corpus=options.corpus,
            skipped=options.skipped,
            passages=options.passages,
            on_record=lambda name, records: counter.to(records, f"of {name}"),
        )
    _print_conversion(options.out, figures)
    console.answer(figures)


def _print_conversion(out: str, figures: dict[str, Any]) -> None:
    """What was read, what became of it, and every reason for which something was left out."""
    rows = [
        (source["source"], source["format"], source["records"], sum(source["skipped"].values()), source["kept"])
        for source in figures["sources"]
    ]
    console.table(f"questions in {out}", ("source", "format", "records read", "skipped", "kept"), rows)
    totals: dict[str, Any] = {name: value for name, value in figures.items() if name != "sources"}
    for source in figures["sources"]:
        asked = source["asked"]
        if asked is not None and source["kept"] < asked:
            totals[f"{source['source']}: asked for"] = asked
        totals |= {f"{source['source']}: skipped, {reason}": n for reason, n in source["skipped"].items()}
        totals |= {f"{source['source']}: {note}": n for note, n in source["notes"].items()}
    console.figures("in all", totals)
