"""`thresher rollout`: its flags, and the recipe that they make, as `thresher eval` makes one.

    thresher rollout --model FOLDER --system eval_rar --questions dev.jsonl --index wiki --n 8 --out rollouts.jsonl

The work is engine/evaluation/trajectories.py's.
"""

import argparse
from pathlib import Path

from thresher.cli import flags
from thresher.cli.commands.eval import flagged_recipe
from thresher.common import signals

HELP = "sample trajectories of questions, with their tokens and log-probs"
PLACE = 36
EXAMPLE = "thresher rollout --model models/warm --system arena --questions dev.jsonl --n 8 --out rollouts.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", help="model folder")
    add("--system", help="a system's name, or the path of a system's file")
    add("--questions", required=True, help="JSONL; gold answers need not be there")
    add("--limit", type=flags.count, help="only the first so many questions")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--index", help="index folder")
    where.add_argument("--url", help="of a retriever's server")
    add("--recipe", metavar="FILE", help="TOML file; not needed where flags say enough")
    flags.add_set(parser)
    flags.add_model_device(parser)
    add("--n", type=flags.samples, default=1, help="samples a question; default 1")
    add("--temperature", type=flags.temperature, help="0 is greedy; default: the recipe's, or 1")
    add("--seed", type=flags.seed, help="of sampling; default: run.seed of the recipe, or 0")
    add("--max-num-seqs", type=flags.count, metavar="N", help="samples at once; short for --set rollout.max_num_seqs=")
    add("--out", required=True, metavar="F.jsonl", help="a line a trajectory, for thresher score or a program")
    add("--resume", action="store_true", help="go on with the file that is there")


def run(options: argparse.Namespace) -> None:
    recipe = flagged_recipe(
        options,
        options.recipe,
        "rollout: no model; give --model FOLDER, or --recipe FILE",
        "rollout: no system; give --system NAME, or --recipe FILE",
    )
    from thresher.engine.evaluation.trajectories import RolloutPlan, run_rollouts

    plan = RolloutPlan(
        questions=options.questions,
        out=Path(options.out),
        samples=options.n,
        temperature=recipe.rollout.temperature if options.temperature is None else options.temperature,
        limit=options.limit,
        resume=options.resume,
    )
    with signals.keeping(lambda: signals.lines_in(plan.out), "--resume"):
        run_rollouts(recipe, plan)
