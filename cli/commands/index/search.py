"""`thresher index search`: the passages of one question, to be read, or the hits of a file's questions, into a file."""

import argparse

from thresher.cli import flags
from thresher.common import console
from thresher.common.errors import UserError

HELP = "the k nearest passages of a question, or of each in a file"
PLACE = 40
EXAMPLE = 'thresher index search --index indexes/mine "Who is the mayor?"'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("question", nargs="?", help="one question, whose passages are printed")
    flags.add_index_search(parser)
    parser.add_argument("--queries", metavar="FILE", help="JSONL of questions in its place; goes with --out")
    parser.add_argument("--out", metavar="FILE", help="JSONL to write, a line a question of --queries")


def run(options: argparse.Namespace) -> None:
    from thresher.engine.config.overrides import parse_overrides
    from thresher.retrieval.building.commands import search_file

    if (options.question is None) == (options.queries is None):
        got = "neither" if options.queries is None else "both"
        raise UserError(f'index search: expected either a question, "..", or --queries FILE, got {got}')
    if (options.queries is None) != (options.out is None):
        raise UserError("index search: --queries FILE and --out FILE go together; one question's passages are printed")
    parameters = parse_overrides(options.set)
    if options.question is not None:
        _print_passages(options, parameters)
        return
    figures = search_file(
        options.index, options.queries, options.k, options.out, parameters, options.gpu, options.verify
    )
    console.figures(f"hits in {options.out}", figures)


def _print_passages(options: argparse.Namespace, parameters: dict[str, int]) -> None:
    from rich.padding import Padding
    from rich.text import Text

    from thresher.retrieval.indexes.load import load_retriever

    if not options.question.strip():
        raise UserError("index search: the question is empty; give some words")
    retriever = load_retriever(options.index, None, parameters, options.gpu, options.verify)
    (hits,) = retriever.search([options.question], options.k)
    for rank, hit in enumerate(hits, 1):
        where = f"{rank}. {hit.passage.title}  [{hit.passage.id}]  {hit.score:.4g}"
        console.console.print(Text(where, style="bold"), soft_wrap=True)
        console.console.print(Padding(Text(hit.passage.text), (0, 0, 0, 3), expand=False))
    if not hits:
        console.console.print("no passage has a word of the question")
    found = [
        {"id": hit.passage.id, "title": hit.passage.title, "text": hit.passage.text, "score": hit.score} for hit in hits
    ]
    console.answer({"question": options.question, "hits": found})
