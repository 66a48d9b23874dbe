"""`thresher eval`: its flags, and the recipe that they make, with a file or without one.

    thresher eval --model FOLDER --system eval_rar --questions dev.jsonl --index wiki --out runs/eval
    thresher eval --best-of runs/train --questions test.jsonl --out runs/eval
    thresher eval --answer-url URL --answer-model NAME --system r1 --questions dev.jsonl --out runs/api

What a flag says wins over the file, `--set` over both, and the preset of the system fills what is left open.

Deliberately absent: the evaluation itself (engine/evaluation/run.py), and imports of torch at the top.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thresher.cli import flags
from thresher.common import console, signals
from thresher.common.errors import UserError
from thresher.engine.config.recipe import Recipe, make_recipe, read_tables
from thresher.engine.config.sections import RolloutSection
from thresher.engine.store.run_folder import Best, RunFolder, best_checkpoint

if TYPE_CHECKING:
    from thresher.engine.evaluation.api_rollout import AnsweredBy

HELP = "answer questions with a system or a baseline, and measure"
PLACE = 40
EXAMPLE = "thresher eval --best-of runs/first --questions test.jsonl --out runs/eval"

KEYS = {  # flag -> the recipe's key
    "model": "model.path",
    "device": "model.device",
    "prompt": "model.prompt",
    "index": "retrieval.index",
    "url": "retrieval.url",
    "k": "retrieval.k",
    "seed": "run.seed",
    "entailment": "judge.entailment",
    "judge_url": "judge.url",
    "judge_model": "judge.model",
    "answer_model": "model.path",  # who answers has the model's place
    "max_num_seqs": "rollout.max_num_seqs",  # of `thresher rollout`
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("recipe", nargs="?", help="TOML file; not needed where flags say enough")
    flags.add_set(parser)
    flags.add_model_device(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", help="model folder")
    which.add_argument("--best-of", metavar="RUN", help="a run folder: its recipe, and its checkpoint of best dev EM")
    add("--system", help="a system's name, or the path of a system's file")
    add("--baseline", metavar="NAME", help="a baseline in the system's place, under the same settings")
    add("--questions", help="JSONL; default: data.dev of the recipe")
    add("--limit", type=flags.count, help="only the first so many")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--index", help="index folder")
    where.add_argument("--url", help="of a retriever's server")
    add("--k", type=flags.count, help="passages of a search, or of a question that brings none")
    add(
        "--distractors",
        type=flags.natural,
        default=0,
        metavar="N",
        help="irrelevant passages added to those in the prompt",
    )
    add(
        "--prompt",
        choices=("raw", "chat"),
        help="chat: through the model's chat template; default: the recipe's, or raw",
    )
    add("--temperature", type=flags.temperature, default=0.0, help="0 (the default) is greedy")
    add("--seed", type=flags.natural, help="of sampling and of noise; default: run.seed of the recipe, or 0")
    add("--entailment", metavar="FOLDER", help="an NLI classifier; default: overlap of words, the stated stand-in")
    add("--judge-url", metavar="URL", help="an OpenAI-compatible server whose chat model judges the answers")
    add("--judge-model", metavar="NAME", help="that model's name")
    flags.add_allow_key(parser)
    add("--answer-url", metavar="URL", help="an OpenAI-compatible server whose chat or completion endpoint answers")
    add("--answer-model", metavar="NAME", help="that model's name")
    add("--answer-key-env", metavar="VARIABLE", help="environment variable that holds that server's key")
    add("--tokenizer", metavar="FOLDER", help="counts its texts, with --answer-url; default: bytes")
    add("--out", required=True, help="folder for trajectories.jsonl, metrics.json and table.md; goes on if unfinished")


def run(options: argparse.Namespace) -> None:
    answered_by = _answered_by(options)
    recipe, best = eval_recipe(options)
    from thresher.engine.evaluation.run import EvalOptions, run_evaluation

    if options.baseline is not None and options.system is not None:
        console.console.print(
            f"eval: baseline {options.baseline} answers; of {options.system} only the preset counts, and fills what is "
            "left open",
            markup=False,
            soft_wrap=True,
        )
    asked = EvalOptions(
        questions=options.questions,
        limit=options.limit,
        temperature=options.temperature,
        noise=options.distractors,
        baseline=options.baseline,
        best=best,
        allow_keys=tuple(options.allow_key),
        answered_by=answered_by,
    )
    out = Path(options.out)
    with signals.keeping(lambda: signals.lines_in(out / "generated.jsonl")):
        console.answer(run_evaluation(recipe, asked, out))


def _answered_by(options: argparse.Namespace) -> "AnsweredBy | None":
    """UserError for a part of an endpoint without the others."""
    from thresher.engine.evaluation.api_rollout import AnsweredBy

    if (options.answer_url is None) != (options.answer_model is None):
        raise UserError("eval: --answer-url URL and --answer-model NAME belong together; give both")
    if options.answer_url is None:
        if options.tokenizer is not None or options.answer_key_env is not None:
            raise UserError("eval: --tokenizer and --answer-key-env are for --answer-url; add it, or leave them out")
        return None
    return AnsweredBy(
        url=options.answer_url, model=options.answer_model, key_env=options.answer_key_env, tokenizer=options.tokenizer
    )


def eval_recipe(options: argparse.Namespace) -> tuple[Recipe, Best | None]:
    """The recipe of an evaluation, and the checkpoint that --best-of chose. UserError where model or system is open."""
    if options.answer_url is not None and (options.model or options.best_of):
        raise UserError("eval: with --answer-url its model answers; leave out --model and --best-of")
    best = best_checkpoint(options.best_of) if options.best_of else None
    file = options.recipe or (RunFolder(Path(options.best_of)).recipe_file if options.best_of else None)
    no_model = "eval: no model; give --model FOLDER, or --best-of RUN, or --answer-url URL, or a recipe"
    no_system = "eval: no system; give --system NAME, or --baseline NAME, or a recipe"
    return flagged_recipe(options, file, no_model, no_system, best), best


def flagged_recipe(
    options: argparse.Namespace, file: str | Path | None, no_model: str, no_system: str, best: Best | None = None
) -> Recipe:
    """The recipe that the flags of KEYS, --system and --baseline make with a file or without one. UserError with one of
    the two sentences where model or system is open. A flag that a command does not have counts as not given."""
    tables = read_tables(file) if file else {}
    _put_flags(tables, options, best)
    if not file:
        given = {text.partition("=")[0].strip() for text in options.set}
        if "model.path" not in given and "path" not in tables.get("model", {}):
            raise UserError(no_model)
        if "system" not in tables and "system.name" not in given:
            raise UserError(no_system)

    def preset(name: str) -> dict[str, dict[str, Any]]:
        return _preset(name, tables, options, bare=not file)

    return make_recipe(tables, str(file or "the command line"), options.set, preset)


def _put_flags(tables: dict[str, Any], options: argparse.Namespace, best: Best | None) -> None:
    def put(key: str, value: object) -> None:
        section, _, name = key.partition(".")
        if isinstance(table := tables.setdefault(section, {}), dict):  # else the recipe is refused for it
            table[name] = value

    if options.index is not None or options.url is not None:
        tables["retrieval"] = {
            key: value for key, value in (tables.get("retrieval") or {}).items() if key not in ("index", "url")
        }
    for flag, key in KEYS.items():
        if getattr(options, flag, None) is not None:
            put(key, getattr(options, flag))
    if best is not None:
        put("model.path", str(best.path))
    baseline = getattr(options, "baseline", None)
    name = baseline or options.system
    if name is not None and (baseline or tables.get("system", {}).get("name") != name):
        tables["system"] = {"name": name}  # template and options of the file's system are none of this one's


def _preset(name: str, tables: dict[str, Any], options: argparse.Namespace, bare: bool) -> dict[str, dict[str, Any]]:
    """What is left open: the system's preset; below a baseline's that of the system it stands in for; and, without a
    file to say it, a context no longer than the model's."""
    from thresher.engine.baselines import load_baseline
    from thresher.engine.systems import load_system
    from thresher.policy.config import read_config

    baseline = getattr(options, "baseline", None)
    switches = tables["system"].get("options", {})
    layers: list[dict[str, dict[str, Any]]] = []
    if baseline is None:
        layers.append(load_system(name, {}).preset)
    else:
        if options.system is not None:
            layers.append(load_system(options.system, {}).preset)
        layers.append(load_baseline(name, switches if isinstance(switches, dict) else {}).preset)
    merged: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for section, values in layer.items():
            merged[section] = merged.get(section, {}) | values
    if (
        bare
        and getattr(options, "answer_model", None) is None
        and isinstance(tables.get("model"), dict)
        and isinstance(tables["model"].get("path"), str)
    ):
        positions = read_config(Path(tables["model"]["path"])).max_position_embeddings
        rollout = merged.setdefault("rollout", {})
        merged["rollout"] = rollout | {
            "max_context": min(rollout.get("max_context", RolloutSection.max_context), positions)
        }
    return merged
