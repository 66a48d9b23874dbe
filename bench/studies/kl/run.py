"""`thresher study kl`: what the choice of a KL estimator does, from one token to a training run.

1. Curves of the estimators' values and gradients (exact.py): at log-ratio -10, k3's coefficient is 22,025, k2's 10.
2. Expected values and gradients by enumeration (exact.py): which estimators are exact, and of what.
3. Training: the demo's small policy, warmed up once, then GRPO with k2 and with k3 from that start, with the same
   questions and noise, at a mild and at a hot learning rate. Each run is an ordinary run folder, and all that differs
   between two of a pair is `grpo.kl_value`.

    start/       world, index and warm-up of `thresher demo`, unless --start names a folder that has them
    runs/        mild-k2-seed0/ ..
    curves.png, enumeration.json, enumeration.png, training.png
    pairs.jsonl  each step of each run; kl.json: each run, and the settings

What is finished in the folder is not done again, and a run that was killed goes on. The policy is pushed off its
reference by the learning rate alone, which is kept constant; batch, beta and clipping are the demo's. Read the largest
coefficients with their signs in mind: one of k3's above 1 belongs to a token that the policy made less likely, since
for one made likelier it stays below 1; k2's grows alike on both sides.

Deliberately absent: a verdict on which estimator trains better. Two seeds of a small model cannot give one; exact match
is reported as it comes.
"""

import itertools
import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from thresher.bench.studies.kl.exact import DRAWS, OUTCOMES, curves, enumerate_all
from thresher.bench.studies.kl.plot import draw_curves, draw_enumeration, draw_training, label
from thresher.common import console
from thresher.common.errors import UserError
from thresher.common.files import atomic_write_text
from thresher.common.jsonl import write_jsonl
from thresher.engine.assemble import read_run_recipe
from thresher.engine.config.recipe import Recipe, load_recipe
from thresher.engine.store.run_folder import read_metrics
from thresher.engine.training.step import Diverged
from thresher.engine.training.train import Progress, train
from thresher.engine.world import stages as demo

# The demo's own learning rate, and twice that. At four times it neither estimator learns anything.
RATES = {"mild": 1e-3, "hot": 2e-3}
ESTIMATORS = ("k2", "k3")
START_SEED = 0
# Of all runs. A constant rate goes on pushing to the last step; greedy exact match is measured before and after.
SETTINGS = ("optim.schedule=constant", "run.save_every=10", "run.keep_checkpoints=1", "run.keep_trajectories=0")
LOGGED = ("kl_largest", "kl_coefficient_largest", "grad_norm", "em", "reward", "capped", "kl_k1", "entropy")
LAST = 5  # sampled exact match at the end is the mean of so many steps


@dataclass(frozen=True, slots=True, kw_only=True)
class KlRun:
    """One training run."""

    rate: str
    estimator: str
    seed: int
    folder: Path
    recipe: Recipe

    @property
    def name(self) -> str:
        return f"{self.rate} {self.estimator} seed {self.seed}"


def run_study(
    out: Path, start: str | None, steps: int, seeds: Sequence[int], run_command: Callable[[list[str]], None]
) -> None:
    """The whole study into the folder `out`; `run_command` runs a command of the demo from its arguments."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: a file of that name is in the way; choose another folder with --out")
    seeds = sorted(set(seeds))
    world = out / "start" if start is None else Path(start)
    cases = make_cases(out, world, steps, seeds)
    for case in cases:  # what does not fit is refused before anything is computed
        check_folder(case)
    if start is not None:
        check_start(world)
    rates = " and ".join(f"{lr:g}" for lr in RATES.values())
    console.console.print(
        f"study kl: curves, enumeration, then {len(cases)} runs of {steps} steps from {world} (k2 and k3, learning "
        f"rate {rates}, seed {' and '.join(map(str, seeds))}), into {out}"
    )
    started = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    draw_curves(curves(), out / "curves.png")
    rows = enumerate_all()
    _write_json(out / "enumeration.json", {"policies": DRAWS, "outcomes": OUTCOMES, "dtype": "float64", "rows": rows})
    draw_enumeration(rows, out / "enumeration.png")
    print_enumeration(rows)
    if start is None:
        make_start(world, run_command)
    stopped = train_all(cases, steps)
    records = {case.name: steps_of(case) for case in cases}
    runs = [summary_of(case, records[case.name], stopped.get(case.name)) for case in cases]
    write_jsonl(
        out / "pairs.jsonl",
        (
            {"rate": case.rate, "estimator": case.estimator, "seed": case.seed, **record}
            for case in cases
            for record in records[case.name]
        ),
    )
    recipe = cases[0].recipe
    draw_training(runs, records, recipe.optim.max_grad_norm, out / "training.png")
    settings = {
        "start": str(world),
        "steps": steps,
        "seeds": seeds,
        "beta": recipe.grpo.beta,
        "max_grad_norm": recipe.optim.max_grad_norm,
        "schedule": recipe.optim.schedule,
        "questions_per_step": recipe.rollout.questions_per_step,
        "group_size": recipe.rollout.group_size,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    _write_json(out / "kl.json", {"settings": settings, "runs": runs})
    print_runs(runs, steps)
    console.console.print(f"{time.perf_counter() - started:.0f} s in all. Pictures and figures are in {out}")


def make_cases(out: Path, world: Path, steps: int, seeds: Sequence[int]) -> list[KlRun]:
    """Every run, in the order in which they are trained: pairs side by side, seed by seed."""
    cases = []
    for seed, rate, estimator in itertools.product(seeds, RATES, ESTIMATORS):
        overrides = [
            *SETTINGS,
            f"run.steps={steps}",
            f"run.eval_every={steps}",
            f"optim.lr={RATES[rate]}",
            f"grpo.kl_value={estimator}",
        ]
        typed = next(stage for stage in demo.stages(world, seed, overrides) if stage[0] == "train")
        assigned = [value for flag, value in itertools.pairwise(typed) if flag == "--set"]
        folder = out / "runs" / f"{rate}-{estimator}-seed{seed}"
        recipe = read_run_recipe(typed[1], assigned)  # train RECIPE --set .. --set .. --out ..
        cases.append(KlRun(rate=rate, estimator=estimator, seed=seed, folder=folder, recipe=recipe))
    return cases


def check_folder(case: KlRun) -> None:
    """UserError if the run's folder was made by a study with other settings."""
    path = case.folder / "recipe.toml"
    if not path.exists():
        return
    stored = load_recipe(path)
    if stored.run.steps != case.recipe.run.steps:
        raise UserError(f"{case.folder}: the run there has {stored.run.steps} steps; give so many, or another --out")
    if differences := stored.differences(case.recipe):
        raise UserError(
            f"{case.folder}: the run there belongs to a study with other settings ({differences[0]}); give those, or "
            "another --out"
        )


def check_start(world: Path) -> None:
    """UserError unless the folder has what the training stage of `thresher demo` reads."""
    for name in ("data/train.jsonl", "data/test.jsonl", "index", "warmup"):
        if not (world / name).exists():
            raise UserError(
                f"{world / name}: no such file or folder; give --start a folder that `thresher demo` wrote, or leave "
                "it out, and the study makes its own"
            )


def make_start(world: Path, run_command: Callable[[list[str]], None]) -> None:
    """The stages of the demo before GRPO; each writes its folder whole or not at all, so one that is there is kept."""
    for typed in demo.stages(world, START_SEED, []):
        if typed[0] in ("train", "report") or Path(typed[typed.index("--out") + 1]).exists():
            continue
        console.console.print(f"$ thresher {shlex.join(typed)}", style="bold", markup=False, soft_wrap=True)
        run_command(typed)


def train_all(cases: Sequence[KlRun], steps: int) -> dict[str, str]:
    """Train what is not trained yet. Returns why a run stopped early, by its name: numbers that were not finite."""
    stopped = {}
    with console.progress_line("study kl", len(cases) * steps) as line:
        for number, case in enumerate(cases):
            try:
                _train(case, number * steps, line)
            except Diverged as error:
                stopped[case.name] = str(error)
    return stopped


def _train(case: KlRun, before: int, line: console.Line) -> None:
    """One run, unless it is finished; `before` steps of the line belong to earlier ones."""

    def watch(progress: Progress) -> None:
        if "eval" not in progress.record:
            largest = progress.record.get("kl_coefficient_largest", 0.0)
            text = f"{case.name}  EM {progress.record['em']:.2f}  largest coefficient {largest:,.1f}"
            line.to(before + progress.step, text)

    if (case.folder / "summary.json").exists():
        line.to(before + case.recipe.run.steps, f"{case.name}  finished before")
    else:
        train(case.recipe, case.folder, case.folder.exists(), watch)


def steps_of(case: KlRun) -> list[dict[str, Any]]:
    """What the study looks at, of every step of a run."""
    records = read_metrics(case.folder)
    return [{key: record.get(key) for key in ("step", *LOGGED)} for record in records if "eval" not in record]


def summary_of(case: KlRun, steps: Sequence[Mapping[str, Any]], stopped: str | None) -> dict[str, Any]:
    """A run in one record: the largest of what can explode, and exact match as it came."""

    def known(key: str) -> list[float]:
        return [step[key] for step in steps if step[key] is not None]

    greedy = [record["eval"]["em"] for record in read_metrics(case.folder) if "eval" in record]
    return {
        "name": case.name,
        "rate": case.rate,
        "lr": case.recipe.optim.lr,
        "estimator": case.estimator,
        "seed": case.seed,
        "steps": len(steps),
        **{key: max(known(key), default=None) for key in ("kl_largest", "kl_coefficient_largest", "grad_norm")},
        "grad_norm_median": median(known("grad_norm")) if known("grad_norm") else None,
        "capped": sum(known("capped")),
        "em_before": greedy[0],
        "em_after": greedy[-1] if len(greedy) > 1 else None,
        "em_sampled": mean(known("em")[-LAST:]) if steps else None,
        "stopped": stopped,
    }


def print_enumeration(rows: Sequence[Mapping[str, Any]]) -> None:
    """Medians over the policies, and what the gradient is found to be on all of them."""
    words = {"exact": "exact", "zero": "zero", "forward": "KL(ref||pi)'s", "biased": "biased"}
    console.table(
        f"Expectation against KL(pi||ref), enumerated: relative error, median of {DRAWS} policies",
        ("estimator", "policy", "value", "gradient", "cosine", "gradient is"),
        [
            (
                label(row),
                row["sampled"].removesuffix(" policy"),
                f"{row['value_error']['median']:.1e}",
                f"{row['reverse_error']['median']:.1e}",
                "-" if row["cosine"] is None else f"{row['cosine']['median']:.2f}",
                words[row["finding"]],
            )
            for row in rows
        ],
    )


def print_runs(runs: Sequence[Mapping[str, Any]], steps: int) -> None:
    """A line for each learning rate and estimator: the mean over seeds, and the range below it."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        groups.setdefault(f"{run['rate']} {run['estimator']}", []).append(run)
    keys = ("kl_largest", "kl_coefficient_largest", "grad_norm", "em_after", "em_sampled")
    rates = ", ".join(f"{rate} {lr:g}" for rate, lr in RATES.items())
    console.table(
        f"GRPO, {steps} steps, learning rate {rates}: largest of a run; EM; mean and range of seeds",
        ("", "token KL", "|dKL/dlogp|", "grad norm", "EM greedy", "EM sampled"),
        [(name, *(_mean_and_range([run[key] for run in group]) for key in keys)) for name, group in groups.items()],
    )
    capped = sum(run["capped"] for run in runs)
    console.console.print(
        f"EM before, greedy: {runs[0]['em_before']:.3f}. Tokens whose exponent was capped: {capped:,}."
    )
    for run in runs:
        if run["stopped"]:
            console.console.print(f"{run['name']} stopped: {run['stopped']}", markup=False)


def _mean_and_range(values: Sequence[float | None]) -> str:
    """The mean, and the range on a line below where the values differ."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    low, high = _rounded(min(known)), _rounded(max(known))
    return _rounded(mean(known)) + ("" if low == high else f"\n{low}–{high}")


def _rounded(value: float) -> str:
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _write_json(path: Path, value: Any) -> None:
    atomic_write_text(path, json.dumps(value, indent=2) + "\n")
