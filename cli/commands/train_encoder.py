"""`thresher train-encoder`: an encoder that finds the sentences that help. engine/compressors/recomp_train.py does the
work."""

import argparse

from thresher.cli import flags
from thresher.common import console

HELP = "train an encoder to find the sentences that help, RECOMP's extractive compressor"
PLACE = 31
EXAMPLE = "thresher train-encoder --records contrasts.jsonl --model models/contriever --out models/recomp"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--records", required=True, help="JSONL that `thresher data sft --kind recomp` wrote")
    parser.add_argument("--model", required=True, help="folder of the encoder to begin with, of the BERT family")
    parser.add_argument("--out", required=True, help="folder to write, for `thresher extract --refiner recomp`")
    parser.add_argument("--steps", type=flags.natural, default=0, help="of the optimiser; 0: three epochs")
    parser.add_argument("--lr", type=flags.positive, default=2e-5, help="highest learning rate")
    parser.add_argument("--batch", type=flags.count, default=64, help="questions a step")
    parser.add_argument("--seed", type=flags.seed, default=0, help="of what is held out, and of the records' order")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where it is trained")


def run(options: argparse.Namespace) -> None:
    from thresher.engine.compressors.recomp_train import train_recomp

    figures = train_recomp(
        options.records,
        options.model,
        options.out,
        steps=options.steps,
        lr=options.lr,
        batch=options.batch,
        seed=options.seed,
        device=options.device,
    )
    console.figures(f"an encoder in {options.out}", figures)
