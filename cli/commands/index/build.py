"""`thresher index build`: a corpus into an index folder. The work is retrieval/building/commands.py's."""

import argparse
from pathlib import Path

from thresher.cli import flags
from thresher.common import console, signals
from thresher.common.errors import UserError

HELP = "encode a corpus into an index folder"
PLACE = 20
EXAMPLE = "thresher index build --corpus corpus.jsonl --embed title+text --out indexes/mine"

# Settings of a trained encoder that may be given in the place of what its folder says.
MODEL_OPTIONS = {
    "pooling": "mean or cls",
    "query_prefix": "text before every query",
    "passage_prefix": "text before every passage",
    "max_length": "tokens of a text",
    "device": "cpu or cuda",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--corpus", required=True, metavar="FILE", help="passages: JSONL or TSV, gzipped if named .gz")
    parser.add_argument("--encoder", default="lexical", help="lexical (hashed words), bm25, or a model's folder")
    parser.add_argument("--embed", default="text", choices=("text", "title+text"), help="what of a passage is encoded")
    parser.add_argument("--kind", help="flat (the default), flat16, ivf, ivfpq, hnsw, or such as IVF4096,Flat")
    parser.add_argument("--memory", metavar="SIZE", help="such as 16GB: pick the kind that fits, and say why")
    parser.add_argument(
        "--recall", type=flags.number, default=0.95, help="what an approximate kind should find; default: 0.95"
    )
    parser.add_argument("--keep", default="float32", help="vectors for exact scores: float32, float16 or none")
    parser.add_argument("--dim", type=flags.count, help="of the lexical encoder; default: 2048")
    for name, text in MODEL_OPTIONS.items():
        kind = flags.count if name == "max_length" else str
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=f"of a model, {text}")
    parser.add_argument("--chunk-words", type=flags.count, default=0, help="cut passages into this many words")
    parser.add_argument("--skip-empty", action="store_true", help="leave out records without text")
    parser.add_argument("--out", required=True, metavar="DIR", help="index folder to write; goes on if unfinished")


def run(options: argparse.Namespace) -> None:
    from thresher.retrieval.building.build import RECORD_FILE, work_folder
    from thresher.retrieval.building.commands import build
    from thresher.retrieval.encoders.lexical import DEFAULT_DIM, LexicalEncoder

    if options.dim is not None and options.encoder != LexicalEncoder.name:
        raise UserError(
            f"--dim is of the encoder {LexicalEncoder.name}, and {options.encoder} takes none; leave it out"
        )

    model = {name: getattr(options, name) for name in MODEL_OPTIONS if getattr(options, name) is not None}
    work = work_folder(Path(options.out))

    def kept() -> str | None:
        return f"{work} keeps what is done" if (work / RECORD_FILE).is_file() else None

    with signals.keeping(kept), console.stages() as on_stage:
        figures = build(
            options.corpus,
            options.out,
            options.encoder,
            options.embed,
            DEFAULT_DIM if options.dim is None else options.dim,
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
