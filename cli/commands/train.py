"""The commands that take a while: they tie the work to what a person sees of it."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from thresher.engine import console
from thresher.engine.assemble import load_parts
from thresher.engine.config.recipe import Recipe, SftSection
from thresher.engine.synthetic.demo import demo
from thresher.engine.training.master_weights import put_adapters
from thresher.engine.training.sft import Trainer, read_data, read_transcripts
from thresher.engine.training.sft_data import Unused, say_unused, write_unused
from thresher.engine.training.train import Progress, train
from thresher.policy.files import atomic_write_text, staged_folder
from thresher.retrieval.data.jsonl import write_jsonl
from thresher.rewards.errors import UserError


def run_sft(recipe: Recipe, out: str | Path) -> None:
    """Fine-tune `model.path`, all of it or adapters, on `sft.transcripts` or `sft.data`; `out` becomes a model folder
    with metrics.jsonl and sft.json beside."""
    sft = recipe.need(SftSection)
    if Path(out).exists():
        raise UserError(f"{out}: exists already; choose another folder for the model")
    parts = load_parts(recipe)
    policy = parts.policy
    encoding = parts.tokenizer, parts.renderer, parts.tools.template, next(iter(policy.config.eos_token_ids), None)
    unused: list[Unused] = []
    questions = 0
    if sft.transcripts is not None:
        transcripts = read_transcripts(sft.transcripts, *encoding)
    else:
        transcripts, unused, questions = read_data(sft, *encoding)
    if recipe.lora is None:
        policy = policy.float()
    else:
        put_adapters(recipe, policy)
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    trainer = Trainer(policy, transcripts, sft, recipe.optim, parts.vocab_size, recipe.run.seed)
    console.console.print(
        f"sft: {len(trainer.training):,} transcripts to train on, {len(trainer.held_out):,} held out, "
        f"{trained:,} parameters, at most {sft.steps} steps"
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
        "parameters trained": trained,
        "questions unused": len(unused),
        "seconds": time.perf_counter() - started,
    }
    with staged_folder(out) as staged:
        policy.save(staged)
        parts.tokenizer.save(staged)
        write_jsonl(staged / "metrics.jsonl", records)
        write_unused(unused, staged / "unused.jsonl")
        atomic_write_text(staged / "sft.json", json.dumps(figures, indent=2) + "\n")
    console.figures(f"sft: model in {out}", figures)
    say_unused(unused, questions, Path(out) / "unused.jsonl")
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


def run_demo(out: Path, seed: int, overrides: list[str], parser: argparse.ArgumentParser) -> None:
    """The chain of demo.py, each command through the parser like one that was typed."""

    def run(arguments: list[str]) -> None:
        options = parser.parse_args(arguments)
        options.handler(options)

    demo(
        out, seed, overrides, run, lambda text: console.console.print(text, style="bold", markup=False, soft_wrap=True)
    )
    from thresher.engine.reporting.report import (
        print_trajectories,  # matplotlib takes a second that other commands need not wait
    )

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
