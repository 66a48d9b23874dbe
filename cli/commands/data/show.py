"""`thresher data show`: a few questions of any format that `data convert` reads, to be looked at."""

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from thresher.cli import flags
from thresher.common import console
from thresher.common.errors import UserError

if TYPE_CHECKING:
    from thresher.retrieval.questions import Question

HELP = "a few questions, with their passages, to be read"
PLACE = 30
EXAMPLE = "thresher data show train.jsonl --n 1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="questions in any format of data convert")
    parser.add_argument("--format", default="auto", help="as in data convert")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--n", type=flags.count, default=3, metavar="N", help="the first so many; default 3")
    which.add_argument("--id", action="append", metavar="ID", help="the question with this id; may be given again")
    parser.add_argument("--full", action="store_true", help="passages and metadata to their end")


def run(options: argparse.Namespace) -> None:
    from thresher.retrieval.datasets.convert import AUTO, MixSource, Tally, read_source
    from thresher.retrieval.datasets.formats import find_format
    from thresher.retrieval.datasets.summary import excerpt

    fmt = None if options.format == AUTO else find_format(options.format)
    tally = Tally(name=options.file)
    questions = read_source(MixSource(paths=(Path(options.file),)), tally, fmt=fmt)
    chosen = islice(questions, options.n) if options.id is None else _with_ids(questions, options.id, options.file)
    shown = []
    for number, question in enumerate(chosen):
        shown.append(asdict(question))
        if not number:
            console.say(f"{options.file}, read as {tally.formats[0]}")
        console.say(f"\n{excerpt(question, whole=options.full)}")
    for where, _, reason in tally.skipped[: options.n]:
        console.say(f"\n{where}: skipped, {reason}")
    skipped = [{"where": where, "reason": reason} for where, _, reason in tally.skipped[: options.n]]
    console.answer({"file": options.file, "formats": list(tally.formats), "questions": shown, "skipped": skipped})


def _with_ids(questions: "Iterator[Question]", ids: list[str], path: str) -> "Iterator[Question]":
    wanted = set(ids)
    for question in questions:
        if question.id in wanted:
            wanted.remove(question.id)
            yield question
        if not wanted:
            return
    raise UserError(f"{path}: no question with the id {min(wanted)!r}; look at some with --n")
