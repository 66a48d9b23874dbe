"""`thresher data sft`: questions, or a teacher's answers, into transcripts for `thresher sft`, or into sentences to
train an encoder on. The records are engine/training/sft_data.py's and engine/compressors/training_data.py's."""

import argparse
import math
from pathlib import Path
from typing import Any

from thresher.cli import flags
from thresher.common import console
from thresher.common.errors import UserError
from thresher.engine.compressors.options import MEASURES
from thresher.engine.training.sft_data import FILCO, KINDS, RECOMP, STYLES, TAUGHT, Unused

HELP = "questions, or a teacher's answers, into records for supervised fine-tuning"
PLACE = 40
EXAMPLE = "thresher data sft --kind reasoning --questions train.jsonl --out warmup.jsonl"

nats = flags.checked(float, "a finite number of at least 0", lambda value: 0 <= value < math.inf)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = (*KINDS, FILCO, RECOMP, *TAUGHT)
    parser.add_argument("--kind", required=True, choices=kinds, help="what a record is to teach: docs/sft.md")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--questions", help="our own JSONL, with passages but for closed-book")
    source.add_argument("--transcripts", metavar="FILE", help="a teacher's, as eval or score has them; right ones stay")
    parser.add_argument("--answer", choices=STYLES, default="tagged", help="between answer tags (the default), or bare")
    parser.add_argument("--template", help="prompt template in place of the kind's own")
    parser.add_argument("--measure", choices=MEASURES, help="of filco records: by what a sentence is said to help")
    parser.add_argument("--margin", type=nats, metavar="NATS", help="by which recomp's negatives fall short; default 1")
    parser.add_argument(
        "--model", help="folder of what writes reasoning records' analyses, or answers for recomp and --measure cxmi"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of that model")
    parser.add_argument("--max-tokens", type=flags.count, default=512, help="of an analysis")
    parser.add_argument("--out", required=True, help="JSONL to write")


def run(options: argparse.Namespace) -> None:
    from thresher.common.jsonl import write_jsonl
    from thresher.engine.episode import read_template
    from thresher.engine.training.sft_data import refuse_nothing, say_unused, taught_records, write_unused

    kind, out = options.kind, Path(options.out)
    _check_flags(options)
    template = None if options.template is None else read_template(options.template, passages=kind != "closed-book")
    figures: dict[str, Any] = {}
    if options.transcripts is not None:
        records, unused = taught_records(options.transcripts, kind, template)
    elif kind == RECOMP:
        records, unused = _contrasts(options)
    else:
        records, unused, author = _of_questions(options, template)
        figures |= {"analyses by": author} if kind == "reasoning" else {}
    total = len(records) + len(unused)
    refuse_nothing(records, unused, options.transcripts or options.questions, kind)
    write_jsonl(out, records)
    listed = out.with_name(f"{out.name}.unused.jsonl")
    write_unused(unused, listed)
    asked = "transcripts" if options.transcripts else "questions"
    console.figures(
        f"{kind} records in {out}", {asked: total, "records": len(records), "unused": len(unused)} | figures
    )
    say_unused(unused, total, listed)


def _of_questions(options: argparse.Namespace, template: str | None) -> tuple[list[dict[str, Any]], list[Unused], str]:
    """Records, what gave none, and who wrote the analyses."""
    from thresher.engine.training.sft_data import TEMPLATED, make_records, why_unusable
    from thresher.retrieval.questions import read_questions

    kind, questions = options.kind, read_questions(options.questions)
    analyses, evidence, author = None, None, TEMPLATED
    if options.model is not None and kind == "reasoning":
        from thresher.engine.training.sft_analyses import write_analyses  # the engine, which the other kinds do without

        author = str(options.model)
        usable = [question for question in questions if why_unusable(question, kind) is None]
        analyses = write_analyses(usable, options.model, options.device, options.max_tokens)
    elif kind == FILCO:
        from thresher.engine.compressors.training_data import silver_evidence

        author = options.measure
        usable = [question for question in questions if why_unusable(question, kind) is None]
        evidence = silver_evidence(usable, options.measure, options.model, options.device, options.answer == "tagged")
    return *make_records(questions, kind, options.answer, template, analyses, author, evidence), author


def _contrasts(options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[Unused]]:
    """Records of an encoder, and what gave none."""
    from thresher.engine.compressors.training_data import MARGIN, make_contrasts
    from thresher.engine.training.sft_data import why_unusable
    from thresher.retrieval.questions import read_questions

    questions = read_questions(options.questions)
    why = {question.id: why_unusable(question, RECOMP) for question in questions}
    margin = MARGIN if options.margin is None else options.margin
    usable = [question for question in questions if why[question.id] is None]
    found = make_contrasts(usable, options.model, margin, options.device, options.answer == "tagged")
    short = f"no sentence makes the answer less likely than the best by more than {margin} nats"
    unused = [Unused(question.id, why[question.id] or short) for question in questions if question.id not in found]
    return [contrast.to_dict() for contrast in found.values()], unused


def _check_flags(options: argparse.Namespace) -> None:
    """UserError where flags contradict each other, before anything is read."""
    if Path(options.out).exists():
        raise UserError(f"{options.out}: exists already; choose another file for the records")
    if options.kind == "reasoning" and (options.template is not None or options.answer != "tagged"):
        raise UserError("--template and --answer are not for reasoning records, whose form and prompt are ARENA's")
    if (options.kind in TAUGHT) != (options.transcripts is not None):
        raise UserError(f"--transcripts is for {' and '.join(TAUGHT)}, which are made of nothing else")
    if options.kind in TAUGHT and options.answer != "tagged":
        raise UserError("--answer is not for a teacher's transcripts, whose answers only say which of them stay")
    if (options.kind == FILCO) != (options.measure is not None):
        raise UserError(f"--measure ({', '.join(MEASURES)}) is for --kind filco, which needs it")
    if options.kind == FILCO and (options.measure == "cxmi") != (options.model is not None):
        raise UserError("--measure cxmi needs --model, the generator whose answers it compares; the others need none")
    if options.kind == FILCO and options.measure != "cxmi" and options.answer != "tagged":
        raise UserError("--answer says how a generator answers, whom filco records ask by --measure cxmi alone")
    if options.kind == RECOMP and options.model is None:
        raise UserError("--kind recomp needs --model, the generator whose answers say which sentence helps")
    if options.kind == RECOMP and options.template is not None:
        raise UserError("--template is a prompt, and a record of kind recomp has none")
    if options.margin is not None and options.kind != RECOMP:
        raise UserError("--margin is for --kind recomp, whose sentences that help less fall short by it")
    if options.model is not None and options.kind not in ("reasoning", FILCO, RECOMP):
        raise UserError(f"--model writes the analyses of reasoning records; a record of kind {options.kind} has none")
