"""`thresher reproduce`: a paper's tables, each by one command. The running is engine/reproduce's."""

import argparse
from pathlib import Path

from thresher.cli import flags
from thresher.common import console

HELP = "the tables of a paper, at its scale or in an invented world"
PLACE = 145
EXAMPLE = "thresher reproduce eval_rar T2 --scale world --seeds 3 --out runs/eval_rar-T2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("paper", nargs="?", help="its name; --list has all")
    add("tables", nargs="*", metavar="TABLE", help="such as T1; default: all of the paper's")
    add(
        "--list",
        action="store_true",
        help="only show the rows, what each needs at the paper's scale, and what has none",
    )
    add("--chip", default="H100", metavar="NAME", help="the GPU that --list plans trainings for; default: H100")
    add("--scale", choices=("paper", "world"), default="world", help="paper: its models and data, which must be there")
    add("--seeds", type=flags.count, default=1, metavar="N", help="train every method with seeds 0 to N - 1")
    add("--limit", type=flags.count, metavar="N", help="only the first N questions of every evaluation and extraction")
    flags.add_set(parser, text="override what the commands read of a recipe (docs/reproduce.md); may be repeated")
    add(
        "--answer-url",
        type=_model_is,
        action="append",
        default=[],
        metavar="MODEL=URL",
        help="an OpenAI-compatible server of a model that is no folder, as the run names it; may be repeated",
    )
    add(
        "--answer-model",
        type=_model_is,
        action="append",
        default=[],
        metavar="MODEL=NAME",
        help="what that server calls it; default: the same",
    )
    add("--prompts", metavar="DIR", help="with --scale paper: SYSTEM.txt or BASELINE.txt in place of our own prompts")
    flags.add_allow_key(parser, "send this environment variable's key to this host, a judge's or a model's server")
    add("--out", help="folder; what is finished there is not done again; default: runs/PAPER-TABLE")


def _model_is(text: str) -> tuple[str, str]:
    model, _, value = text.partition("=")
    if not (model and value):
        raise argparse.ArgumentTypeError(f"expected MODEL=.., such as gpt-4o=https://api.openai.com/v1, got {text}")
    return model, value


def run(options: argparse.Namespace) -> None:
    from thresher.common.errors import UserError
    from thresher.engine.reproduce.manifest import paper_names, read_manifest, servers_of
    from thresher.engine.reproduce.pipelines import Scale
    from thresher.engine.reproduce.run import reproduce

    if options.list:
        from thresher.engine.planning.time import CHIPS
        from thresher.engine.reproduce.tables import listing, plan_in_words

        if options.chip not in CHIPS:
            raise UserError(f"--chip {options.chip}: expected one of {', '.join(CHIPS)}")
        manifests = [read_manifest(name) for name in ([options.paper] if options.paper else paper_names())]
        chip, training = CHIPS[options.chip], Scale("paper", overrides=tuple(options.set)).of_trainings
        records = [one for manifest in manifests for one in listing(manifest, chip, options.tables, training)]
        left_out = {
            f"{manifest.name}: {what}": why for manifest in manifests for what, why in manifest.left_out.items()
        }
        console.answer({"rows": records, "left_out": left_out})
        rows = [
            (
                one["paper"],
                one["table"],
                one["row"],
                ", ".join(one["world"]) or "-",
                ", ".join(one["stages"]),
                plan_in_words(one["planned"], one["needs"]),
            )
            for one in records
        ]
        heads = ("paper", "table", "row", "in the world", "stages", f"on one {options.chip}")
        console.table("what can be reproduced", heads, rows)
        console.table("left out", ("what", "why"), list(left_out.items()))
        return
    if options.paper is None:
        raise UserError(f"reproduce: name a paper, one of {', '.join(paper_names())}, or give --list")
    out = Path(options.out or f"runs/{'-'.join([options.paper, *options.tables])}")
    keys = tuple(options.allow_key)
    servers = servers_of(read_manifest(options.paper), options.answer_url, options.answer_model, keys)
    prompts = None if options.prompts is None else Path(options.prompts)
    scale = Scale(options.scale, range(options.seeds), tuple(options.set), options.limit, keys, servers, prompts)
    found = reproduce(options.paper, options.tables, scale, out, options.run_command)
    console.answer(found)
