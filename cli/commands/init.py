"""`thresher init`: a model folder with random weights, from a config and a tokenizer that is given or trained."""

import argparse

from thresher.cli import flags
from thresher.engine import console

HELP = "make a model folder with random weights"
PLACE = 10
EXAMPLE = "thresher init --config config.json --tokenizer models/Qwen2.5-0.5B --out runs/init"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, help="config.json of a supported family")
    parser.add_argument("--tokenizer", help="folder with a tokenizer.json, or the file")
    parser.add_argument(
        "--train-tokenizer", nargs="+", default=[], metavar="FILE", help="train one on the strings of JSONL files"
    )
    parser.add_argument("--vocab-size", type=flags.count, default=1024, help="of a tokenizer that is trained")
    flags.add_set(parser, "KEY=VALUE", "override a key of the config; may be repeated")
    parser.add_argument("--seed", type=flags.integer, default=0, help="of the random weights")
    parser.add_argument("--embedding-std", type=flags.positive, metavar="STD", help="default: initializer_range")
    parser.add_argument("--zero-outputs", action="store_true", help="every layer begins as the identity")
    parser.add_argument("--out", required=True, help="model folder to write")


def run(options: argparse.Namespace) -> None:
    from thresher.engine.synthetic.random_model import initialise

    figures = initialise(
        options.config,
        options.out,
        tokenizer_path=options.tokenizer,
        train_on=options.train_tokenizer,
        vocab_size=options.vocab_size,
        overrides=options.set,
        seed=options.seed,
        embedding_std=options.embedding_std,
        zero_outputs=options.zero_outputs,
    )
    console.figures(f"model with random weights in {options.out}", figures)
