"""`thresher init`: a model folder with random weights, from a config and a tokenizer that is given or trained; or a
trained model with more layers on top."""

import argparse

from thresher.cli import flags
from thresher.common import console

HELP = "make a model folder with random weights"
PLACE = 10
EXAMPLE = "thresher init --config config.json --tokenizer models/Qwen2.5-0.5B --out runs/init"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    begun = parser.add_mutually_exclusive_group(required=True)
    begun.add_argument("--config", help="config.json of a supported family")
    begun.add_argument("--model", help="model folder to put --add-layers on, in place of a config and a tokenizer")
    parser.add_argument("--add-layers", type=flags.count, metavar="N", help="layers on top that begin as the identity")
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
    from thresher.engine.world.random_model import add_layers, initialise

    if options.model is not None or options.add_layers is not None:
        _check_alone(options)
        figures = add_layers(options.model, options.add_layers, options.out, seed=options.seed)
        console.figures(f"model with more layers in {options.out}", figures)
        return
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


def _check_alone(options: argparse.Namespace) -> None:
    """UserError for one of --model and --add-layers without the other, or with a flag that changes nothing there."""
    from thresher.common.errors import UserError

    if options.model is None or options.add_layers is None:
        raise UserError("init: --model FOLDER and --add-layers N belong together; give both")
    given = ("tokenizer", "train_tokenizer", "set", "embedding_std", "zero_outputs")
    if others := [f"--{name.replace('_', '-')}" for name in given if getattr(options, name)]:
        raise UserError(f"init: {others[0]} is for a new model; leave it out, for --model FOLDER brings its own")
