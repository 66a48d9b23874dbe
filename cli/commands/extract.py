"""`thresher extract`: its flags, and what a person sees while it runs. The work is `engine/extraction/run.py`'s."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thresher.cli import flags
from thresher.common import console, signals
from thresher.common.errors import UserError
from thresher.engine.compressors.options import NAMES, UNITS, compressor_options

if TYPE_CHECKING:
    from thresher.engine.extraction.run import Chosen

HELP = "evidence from passages, for whoever answers"
PLACE = 60
EXAMPLE = "thresher extract --model models/eviomni --questions dev.jsonl --index indexes/mine --out evidence.jsonl"

kept = flags.checked(float, "a share above 0, up to 1", lambda value: 0 < value <= 1)

# Flags that are fields of the plan as they are.
PLAN = (
    *("questions", "out", "index", "url", "template", "system", "baseline", "seed", "evidence_tokens"),
    *("actions", "limit", "batch"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help="folder of the extractor, or of the refiner's encoder")
    which.add_argument(
        "--best-of", metavar="RUN", help="a run folder: its checkpoint of best dev EM, asked as it trained"
    )
    protocol = parser.add_mutually_exclusive_group()
    protocol.add_argument("--system", metavar="NAME", help="whose protocol it follows; default: the run's, or eviomni")
    protocol.add_argument(
        "--baseline", metavar="NAME", help="extract_only, or cot with system.options.passages, in its place"
    )
    protocol.add_argument(
        "--refiner",
        choices=NAMES,
        help="in the place of a trained EviOmni: filco writes sentences that help; parts are kept by a policy's "
        "self-information (selective-context), an encoder's vectors (recomp), a classifier of tokens (llmlingua-2)",
    )
    parser.add_argument("--questions", required=True, help="JSONL; neither passages nor gold answers must be there")
    parser.add_argument("--out", required=True, metavar="F.jsonl", help="a line per question; goes on if it is there")
    parser.add_argument(
        "--keep", type=kept, metavar="SHARE", help="of the units, with selective-context and llmlingua-2; default .5"
    )
    parser.add_argument("--unit", choices=UNITS, help="of selective-context; default sentence")
    parser.add_argument("--sentences", type=flags.count, metavar="N", help="that recomp keeps; default 1")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--index", help="folder to search for passages, where questions bring none")
    place.add_argument("--url", help="of a retrieval server instead")
    parser.add_argument("--k", type=flags.count, help="passages of a search; default: the run's, or 5")
    parser.add_argument(
        "--distractors", type=flags.natural, default=0, metavar="N", help="irrelevant passages added to each question's"
    )
    parser.add_argument("--seed", type=flags.natural, default=0, help="of the noise; default 0")
    parser.add_argument(
        "--evidence-tokens", type=flags.count, metavar="N", help="evidence is cut to so many tokens; default: never"
    )
    parser.add_argument("--template", metavar="FILE", help="the extractor's prompt, with {question} and {passages}")
    parser.add_argument(
        "--prompt", choices=("raw", "chat"), help="chat: in the local models' templates; default: the run's, or raw"
    )
    parser.add_argument(
        "--loop",
        choices=("traditional", "agentic"),
        default="traditional",
        help="who asks: every question once, or an agent that searches",
    )
    for who, text in (("answer", "answers from the evidence"), ("agent", "searches, with --loop agentic")):
        parser.add_argument(f"--{who}-model", metavar="DIR", help=f"folder of the model that {text}")
        parser.add_argument(f"--{who}-url", metavar="URL", help="of a server that speaks OpenAI's chat completions")
        parser.add_argument(f"--{who}-name", metavar="MODEL", help="the model's name there")
        parser.add_argument(f"--{who}-template", metavar="FILE", help="its prompt, with {question}")
    parser.add_argument("--actions", type=flags.count, default=4, help="searches of the agent, at most; default 4")
    parser.add_argument("--limit", type=flags.count, help="only the first so many questions")
    parser.add_argument("--batch", type=flags.count, default=64, help="questions done between two writes; default 64")
    parser.add_argument("--key-env", metavar="VARIABLE", help="environment variable that holds the chat server's key")
    parser.add_argument(
        "--patience", type=flags.seconds, default=300.0, metavar="SECONDS", help="that a server may stay away"
    )
    flags.add_set(parser, text="model, rollout, retrieval or system, as in recipes")
    flags.add_model_device(parser)


def run(options: argparse.Namespace) -> None:
    from thresher.engine.extraction.run import ExtractionPlan, extract

    agentic = options.loop == "agentic"
    generator, agent = _chosen(options, "answer"), _chosen(options, "agent")
    if agentic != (agent is not None):
        raise UserError(
            "--loop agentic needs an agent: give --agent-model DIR, or --agent-url URL and --agent-name MODEL"
            if agentic
            else "an agent is for --loop agentic; add it, or leave out what begins with --agent"
        )
    if agentic and generator is not None:
        raise UserError("with --loop agentic the agent answers; leave out what begins with --answer")
    if agentic and options.distractors:
        raise UserError("--distractors adds passages to a question's own, and an agent searches; leave one of them out")
    plan = ExtractionPlan(
        refining=compressor_options(options.refiner, keep=options.keep, unit=options.unit, sentences=options.sentences),
        **_extractor(options),
        generator=generator,
        agent=agent,
        overrides=tuple(flags.overrides(options)),
        **{name: getattr(options, name) for name in PLAN},
        noise=options.distractors,
        key_env=options.key_env,
        patience=options.patience,
    )
    by = plan.model if options.refiner is None else f"{options.refiner} of {plan.model}"
    console.announce(f"extract: {options.loop}, from {plan.questions} with {by}, into {plan.out}")
    with signals.keeping(lambda: signals.lines_in(Path(plan.out))), console.stages() as on_stage:
        figures = extract(
            plan,
            lambda done, of: on_stage("extract", done, of),
            lambda text: console.console.print(text, markup=False, soft_wrap=True),
        )
    console.figures(f"extract: {plan.out}", figures)


def _extractor(options: argparse.Namespace) -> dict[str, Any]:
    """The extractor's folder and what a run that it comes from says of it; flags win."""
    from thresher.engine.config.recipe import read_tables
    from thresher.engine.store.run_folder import RunFolder, best_checkpoint

    if options.best_of is None:
        return {"model": options.model, "k": options.k or 5, "prompt": options.prompt or "raw"}
    tables = read_tables(RunFolder(Path(options.best_of)).recipe_file)
    return {
        "model": str(best_checkpoint(options.best_of).path),
        "run": options.best_of,
        "k": options.k or tables.get("retrieval", {}).get("k", 5),
        "prompt": options.prompt or tables["model"].get("prompt", "raw"),
    }


def _chosen(options: argparse.Namespace, who: str) -> "Chosen | None":
    """The model that was named for `who`, or None."""
    from thresher.engine.extraction.run import Chosen

    given = {key: getattr(options, f"{who}_{key}") for key in ("model", "url", "name", "template")}
    if all(value is None for value in given.values()):
        return None
    if (given["model"] is None) == (given["url"] is None) or (given["url"] is None) != (given["name"] is None):
        raise UserError(f"expected either --{who}-model DIR, or --{who}-url URL with --{who}-name MODEL")
    return Chosen(**given)
