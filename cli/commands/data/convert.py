"""`thresher data convert`, `check` and `show`: their flags, and what a person sees while they run.

The work is `retrieval/datasets`'s. Deliberately absent: imports of it at the top, since the command line is read, and
its help printed, without it.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thresher.cli import flags
from thresher.engine import console
from thresher.rewards.errors import UserError

if TYPE_CHECKING:
    from thresher.retrieval.questions import Question

EVERY = 500  # records between two words on how far it is


def data_commands(actions: Any) -> None:
    """Adds the three to the sub-commands of `thresher data`."""
    for name, arguments, handler, text in (
        ("convert", convert_arguments, run_convert, "published question sets into one file of questions"),
        ("check", check_arguments, run_check, "what a file of questions holds, and whether every line is sound"),
        ("show", show_arguments, run_show, "a few questions, with their passages, to be read"),
    ):
        parser = actions.add_parser(name, help=text, description=text)
        arguments(parser)
        parser.set_defaults(handler=handler)


def convert_arguments(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument("--seed", type=int, help="draw them by lot and shuffle; without: the first ones, in order")
    parser.add_argument("--aliases", metavar="FILE", help="2Wiki's id_aliases.json: further gold answers")
    parser.add_argument(
        "--corpus", metavar="FILE", help="write their passages too, each once, for thresher index build"
    )
    parser.add_argument("--skipped", metavar="FILE", help="write which records were left out, and why")
    parser.add_argument("--out", required=True, metavar="FILE", help="JSONL to write, gzipped if named .gz")


def check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="questions as training reads them")


def show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="questions in any format of data convert")
    parser.add_argument("--format", default="auto", help="as in data convert")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--n", type=flags.count, default=3, metavar="N", help="the first so many; default 3")
    which.add_argument("--id", action="append", metavar="ID", help="the question with this id; may be given again")
    parser.add_argument("--full", action="store_true", help="passages and metadata to their end")


def run_convert(options: argparse.Namespace) -> None:
    from thresher.retrieval.datasets.convert import Source, convert, parse_mix

    if options.mix and options.limit is not None:
        raise UserError("--limit is for --in; with --mix, put a count behind each file, such as NAME=FILE:1000")
    if options.mix:
        sources = [parse_mix(text) for text in options.mix]
    else:
        sources = [Source(paths=tuple(map(Path, options.files)), count=options.limit)]
    with console.console.status(f"reading into {options.out}") as status:

        def on_record(name: str, records: int) -> None:
            if records % EVERY == 0:
                status.update(f"{name}: {records:,} records")

        figures = convert(
            sources,
            options.out,
            flavour=options.format,
            seed=options.seed,
            aliases=options.aliases,
            corpus=options.corpus,
            skipped=options.skipped,
            on_record=on_record,
        )
    _tell_conversion(options.out, figures)
    print(json.dumps(figures, ensure_ascii=False))


def run_check(options: argparse.Namespace) -> None:
    from thresher.retrieval.datasets.summary import summarize

    figures = summarize(options.file)
    spreads = {f"{part}, {name}": figures[part][name] for part in ("per question", "words") for name in figures[part]}
    plain = {name: value for name, value in figures.items() if name not in ("per question", "words")}
    console.figures(options.file, {**plain, **spreads})
    print(json.dumps(figures))


def run_show(options: argparse.Namespace) -> None:
    from thresher.retrieval.datasets.convert import AUTO, Source, Tally, read_source
    from thresher.retrieval.datasets.flavours import find_flavour
    from thresher.retrieval.datasets.summary import excerpt

    flavour = None if options.format == AUTO else find_flavour(options.format)
    tally = Tally(name=options.file)
    questions = read_source(Source(paths=(Path(options.file),)), tally, flavour=flavour)
    chosen = islice(questions, options.n) if options.id is None else _with_ids(questions, options.id, options.file)
    for number, question in enumerate(chosen):
        if not number:
            print(f"{options.file}, read as {tally.flavours[0]}")
        print(f"\n{excerpt(question, whole=options.full)}")
    for where, _, reason in tally.skipped[: options.n]:
        print(f"\n{where}: skipped, {reason}")


def _with_ids(questions: "Iterator[Question]", ids: list[str], path: str) -> "Iterator[Question]":
    wanted = set(ids)
    for question in questions:
        if question.id in wanted:
            wanted.remove(question.id)
            yield question
        if not wanted:
            return
    raise UserError(f"{path}: no question with the id {min(wanted)!r}; look at some with --n")


def _tell_conversion(out: str, figures: dict[str, Any]) -> None:
    """What was read, what became of it, and every reason for which something was left out."""
    rows = [
        (source["source"], source["format"], source["records"], sum(source["skipped"].values()), source["kept"])
        for source in figures["sources"]
    ]
    console.table(f"questions in {out}", ("source", "format", "records read", "skipped", "kept"), rows)
    told: dict[str, Any] = {name: value for name, value in figures.items() if name != "sources"}
    for source in figures["sources"]:
        asked = source["asked"]
        if asked is not None and source["kept"] < asked:
            told[f"{source['source']}: asked for"] = asked
        told |= {f"{source['source']}: skipped, {reason}": n for reason, n in source["skipped"].items()}
        told |= {f"{source['source']}: {note}": n for note, n in source["notes"].items()}
    console.figures("in all", told)
