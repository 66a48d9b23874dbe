"""The commands that take a while: they tie the work to what a person sees of it."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from thresher.engine import console
from thresher.engine.assemble import load_parts, load_retrieval
from thresher.engine.demo import demo
from thresher.engine.evaluate import check_all, evaluate, summarise
from thresher.engine.recipe import Data, Recipe, Sft
from thresher.engine.sft import Trainer, read_transcripts
from thresher.engine.train import Progress, train
from thresher.policy.files import atomic_write_text, staged_folder
from thresher.retrieval.jsonl import write_jsonl
from thresher.retrieval.questions import read_questions
from thresher.rewards.errors import UserError


def run_sft(recipe: Recipe, out: str | Path) -> None:
    """Fine-tune `model.path` on `sft.transcripts`; `out` becomes a model folder with metrics.jsonl and sft.json
    beside."""
    sft = recipe.need(Sft)
    if Path(out).exists():
        raise UserError(f"{out}: exists already; choose another folder for the model")
    parts = load_parts(recipe)
    transcripts = read_transcripts(sft.transcripts, parts.tokenizer, parts.renderer, parts.tools.template)
    policy = parts.policy.float()
    trainer = Trainer(policy, transcripts, sft, recipe.optim, parts.vocab_size, recipe.run.seed)
    console.console.print(
        f"sft: {len(trainer.training):,} transcripts to train on, {len(trainer.held_out):,} held out, "
        f"{policy.parameter_count():,} parameters, at most {sft.steps} steps"
    )
    started = time.perf_counter()
    records: list[dict[str, Any]] = []
    with console.progress_line("sft", sft.steps) as line:

        def log(record: dict[str, Any]) -> None:
            records.append(record)
            copying = next((r["copying"] for r in reversed(records) if "copying" in r), None)
            text = f"loss {record['loss']:.3f}" + (f"  names copied right {copying:.0%}" if copying is not None else "")
            line.to(record["step"], text)

        result = trainer.run(log)
    figures = {
        "steps": result.steps,
        "restarts": result.restarts,
        "loss": result.loss,
        "names copied right": result.copying,
        "gate": sft.gate,
        "passed": result.passed,
        "seconds": time.perf_counter() - started,
    }
    with staged_folder(out) as staged:
        policy.save(staged)
        parts.tokenizer.save(staged)
        write_jsonl(staged / "metrics.jsonl", records)
        atomic_write_text(staged / "sft.json", json.dumps(figures, indent=2) + "\n")
    console.figures(f"sft: model in {out}", figures)
    if not result.passed:
        console.console.print(
            f"The gate was not reached: {result.copying:.0%} of the names were copied right, {sft.gate:.0%} wanted. "
            "The model is written all the same; GRPO may learn little from it. Try more sft.steps or another run.seed."
        )


def run_train(recipe: Recipe, out: str | Path, resume: bool) -> None:
    """Train into the run folder `out` and show a line that moves."""
    rollout = recipe.rollout
    console.console.print(
        f"train: {recipe.run.steps} steps of {rollout.questions_per_step} questions x {rollout.group_size} samples, "
        f"{recipe.grpo.kl_value} with beta {recipe.grpo.beta:g}, into {out}"
    )
    greedy: list[float] = []
    with console.progress_line("train", recipe.run.steps) as line:

        def watch(progress: Progress) -> None:
            record = progress.record
            if "eval" in record:
                greedy.append(record["eval"]["em"])
                if progress.step == 0:
                    line.to(0, f"before: EM {greedy[-1]:.3f} (greedy, {record['eval']['questions']} questions)")
                return
            text = f"reward {record['reward']:.3f}  EM {record['em']:.3f}"
            text += f"  greedy {greedy[-1]:.3f}" if greedy else ""
            text += f"  gap {record['logprob_gap_max']:.0e}" if "logprob_gap_max" in record else "  no update"
            line.to(progress.step, text)

        summary = train(recipe, out, resume, watch)
    console.figures(f"train: run in {out}", summary)


def run_eval(
    recipe: Recipe, questions_path: str | None, limit: int | None, temperature: float, out: str | Path
) -> None:
    """Answer questions once each; `out` gets trajectories.jsonl and metrics.json."""
    if Path(out).exists():
        raise UserError(f"{out}: exists already; choose another folder for the evaluation")
    path = questions_path or recipe.need(Data).dev
    if path is None:
        raise UserError("eval: no questions; give --questions FILE, or data.dev in the recipe")
    questions = read_questions(path)[:limit]
    parts = load_parts(recipe)
    rollout = parts.rollout(load_retrieval(recipe))
    started = time.perf_counter()
    with console.progress_line("eval", len(questions)) as line:
        done = 0

        def progress(count: int) -> None:
            nonlocal done
            done += count
            line.to(done, "")

        judged = evaluate(rollout, questions, temperature, recipe.run.seed, progress)
    check_all(judged, parts.tokenizer, parts.system.tags, parts.limits.max_context)
    figures = summarise(judged) | {"temperature": temperature, "seconds": time.perf_counter() - started}
    with staged_folder(out) as staged:
        write_jsonl(staged / "trajectories.jsonl", (entry.to_dict(parts.tokenizer) for entry in judged))
        atomic_write_text(staged / "metrics.json", json.dumps(figures, indent=2) + "\n")
    console.figures(f"eval: {out}", figures)


def run_demo(out: Path, seed: int, overrides: list[str], parser: argparse.ArgumentParser) -> None:
    """The chain of demo.py, each command through the parser like one that was typed."""

    def run(arguments: list[str]) -> None:
        options = parser.parse_args(arguments)
        options.handler(options)

    demo(
        out, seed, overrides, run, lambda text: console.console.print(text, style="bold", markup=False, soft_wrap=True)
    )
    from thresher.engine.report import print_trajectories  # matplotlib takes a second that other commands need not wait

    print_trajectories(out / "grpo")
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    rows = [
        ("EM", summary["em_before"], summary["em_after"]),
        ("F1", summary["f1_before"], summary["f1_after"]),
    ]
    console.table(
        f"{summary['questions']} held-out questions, greedy, seed {seed}", ("", "after warm-up", "after GRPO"), rows
    )
    console.console.print(f"{summary['seconds']:.0f} s in all. Look at {out / 'report.html'}")
