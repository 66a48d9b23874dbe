"""`thresher study kl`: the choice of a KL estimator, from one token to a training run.

1. Curves of the estimators' values and gradients: at log-ratio -10, k3's coefficient is 22,025, k2's 10.
2. Expected values and gradients by enumeration, without sampling: which estimators are exact, and for which KL.
3. Training: the demo's small policy, warmed up once, then GRPO with k2 and with k3 from that start, with the same
   questions and noise, at a mild and at a hot learning rate. The two runs of a pair differ only in `grpo.kl_value`.
   A pretrained model is trained by its own recipe, at that recipe's learning rate, with k1, k2 and k3.

    start/       world, index and warm-up of `thresher demo`, unless --start or --recipe names another start
    runs/        mild-k2-seed0/ ..
    curves.png, enumeration.json, enumeration.png, training.png
    pairs.jsonl  each step of each run; kl.json: each run, and the settings

Only the learning rate moves the policy away from its reference; it is constant, and batch, beta and clipping are the
demo's. A coefficient of k3 above 1 belongs to a token that became less likely; k2's grows equally on both sides. Two
seeds of a small model do not decide which estimator trains better. k1 has no gradient in expectation: its run shows
where the reward leads without a KL term.

Axes: V outcomes, X points of a curve (docs/notation.md).
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from thresher.bench.plots import draw_kl_curves, draw_kl_enumeration, draw_kl_training, estimator_label
from thresher.bench.studies.runs import (
    ModelRecipe,
    StudyRun,
    check_folder,
    check_out,
    load_task,
    run_stages,
    train_all,
    write_json,
)
from thresher.common import console
from thresher.common.errors import UserError
from thresher.common.jsonl import write_jsonl
from thresher.engine.assemble import read_run_recipe
from thresher.engine.config.sections import SystemSection
from thresher.engine.store.run_folder import read_metrics
from thresher.engine.world import stages as demo
from thresher.kernels import grpo_loss
from thresher.kernels.objective import ESTIMATORS, kl_coefficient, kl_values

REACH = 12.0  # of the curves, in nats to either side: a probability of 6e-6 where the reference has 1
POINTS = 481
# (value, gradient). The last combines an exact value with an exact gradient, on policy, without a ratio.
CHOICES = (("k1", "k1"), ("k2", "k2"), ("k3", "k3"), ("k3_ratio", "k3_ratio"), ("k3", "k2"))
DRAWS, OUTCOMES, SPREAD = 100, 7, 1.5  # random policies, and the standard deviation of their logits
EXACT = 1e-10
# The demo's own learning rate, and twice that. At four times it, neither estimator learns anything.
RATES = {"mild": 1e-3, "hot": 2e-3}
TRAINED = ("k2", "k3")
MODEL_TRAINED = ("k1", "k2", "k3")
# For recipes with 0. Advantages are about 1, so k2 pulls back a token that became e^5 times as likely as at the start
# with half the strength of a reward.
MODEL_BETA = 0.1
START_SEED = 0
# For all runs. A constant rate stays effective to the last step; greedy exact match is measured before and after.
SETTINGS = ("optim.schedule=constant", "run.save_every=10", "run.keep_checkpoints=1", "run.keep_trajectories=0")
LOGGED = ("kl_largest", "kl_coefficient_largest", "grad_norm", "em", "f1", "reward", "capped", "kl_k1", "entropy")
SCORES = ("em", "f1")
LAST = 5  # figures at the end are means over this many steps


# curves and enumeration


@dataclass(frozen=True, slots=True)
class EstimatorCurve:
    """Value and coefficient c = dKL/dlogp of one token over d = log pi - log pi_ref (kernels/objective.py).

    All are [X] float64, in nats (d, value) or without unit (coefficient).
    """

    name: str
    ratio: float  # pi / pi_old, which only k3_ratio uses
    d_X: Tensor
    value_X: Tensor
    coefficient_X: Tensor


def curve(name: str, ratio: float = 1.0, points: Sequence[float] | None = None) -> EstimatorCurve:
    """Return an estimator's curve at the given values of d, by default from -REACH to REACH."""
    grid_X = torch.linspace(-REACH, REACH, POINTS, dtype=torch.float64)
    d_X = grid_X if points is None else torch.tensor(points, dtype=torch.float64)
    ratio_X = torch.full_like(d_X, ratio)
    return EstimatorCurve(name, ratio, d_X, kl_values(d_X, ratio_X)[name], kl_coefficient(name, d_X, ratio_X))


def curves() -> list[EstimatorCurve]:
    """Return every estimator's curve on policy, and k3_ratio's for pi half or twice pi_old."""
    return [*(curve(name) for name in ESTIMATORS), *(curve("k3_ratio", ratio) for ratio in (0.5, 2.0))]


def expectation(name: str, gradient: str, logits_V: Tensor, old_V: Tensor, ref_V: Tensor) -> tuple[float, Tensor]:
    """Return (expected value, expected gradient [V]) of an estimator in the loss, over samples of `old_V`.

    logits_V: of pi, float64. old_V, ref_V: probabilities, float64. Every outcome y is one row of the product's own
    loss, with weight pi_old(y). The hidden states are a single 1, so the head's only column is z; advantages are 0,
    beta is 1:

        sum_y pi_old(y) KL_y            against  KL(pi || ref) = sum_y pi(y) (log pi(y) - log ref(y))
        sum_y pi_old(y) c_y dlog pi(y)  against  its gradient by autograd, and that of KL(ref || pi)
    """
    head_VH = logits_V.detach()[:, None].clone().requires_grad_(True)
    outcomes = len(logits_V)
    result = grpo_loss(
        logits_V.new_ones(outcomes, 1),
        head_VH,
        torch.arange(outcomes),
        old_V.log(),
        torch.zeros_like(old_V),
        old_V,
        ref_logprobs_T=ref_V.log(),
        kl_value=name,
        kl_gradient=gradient,
        beta=1.0,
    )
    result.loss.backward()
    assert head_VH.grad is not None
    return float(result.loss.detach()), head_VH.grad[:, 0]


def exact(logits_V: Tensor, ref_V: Tensor) -> dict[str, tuple[float, Tensor]]:
    """Return (value, gradient [V] in pi's logits) of "reverse" KL(pi || ref) and "forward" KL(ref || pi)."""
    result = {}
    for direction in ("reverse", "forward"):
        z_V = logits_V.detach().clone().requires_grad_(True)
        logp_V, log_ref_V = torch.log_softmax(z_V, 0), ref_V.log()
        terms_V = logp_V.exp() * (logp_V - log_ref_V) if direction == "reverse" else ref_V * (log_ref_V - logp_V)
        terms_V.sum().backward()
        assert z_V.grad is not None
        result[direction] = (float(terms_V.detach().sum()), z_V.grad)
    return result


def enumerate_all(draws: int = DRAWS, seed: int = 0) -> list[dict[str, Any]]:
    """Return a row for each sampling distribution and choice of estimators, over `draws` random (pi, pi_old, pi_ref).

    "value_error": |expected value - KL| / KL; "reverse_error", "forward_error": distance of the expected gradient
    from that of KL(pi || ref), KL(ref || pi), relative to its length; "length": of the expected gradient, relative to
    the reverse KL's; "cosine" with the reverse KL's gradient, null if there is no gradient. Each is
    {"smallest", "median", "largest"} over the draws. "finding": the resulting kind of gradient:
    "exact", "zero", "forward" (exact for KL(ref || pi)) or "biased".
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (draws, 3, OUTCOMES)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64) * SPREAD
    rows = []
    for policy in ("on policy", "off policy"):
        for value, gradient in CHOICES:
            errors = [
                _errors(value, gradient, pi_V, pi_V if policy == "on policy" else old_V, ref_V)
                for pi_V, old_V, ref_V in logits
            ]
            measured = {key: _over_draws([error[key] for error in errors]) for key in errors[0]}
            rows.append(
                {"sampled": policy, "value": value, "gradient": gradient, **measured, "finding": _finding(measured)}
            )
    return rows


def _errors(value: str, gradient: str, pi_V: Tensor, old_V: Tensor, ref_V: Tensor) -> dict[str, float | None]:
    """Return the errors of one draw; all three distributions are given as logits."""
    ref_V = torch.softmax(ref_V, 0)
    expected, expected_V = expectation(value, gradient, pi_V, torch.softmax(old_V, 0), ref_V)
    kl = exact(pi_V, ref_V)
    reverse, reverse_V = kl["reverse"]
    forward_V = kl["forward"][1]
    length = float(expected_V.norm() / reverse_V.norm())
    return {
        "value_error": abs(expected - reverse) / reverse,
        "reverse_error": float((expected_V - reverse_V).norm() / reverse_V.norm()),
        "forward_error": float((expected_V - forward_V).norm() / forward_V.norm()),
        "length": length,
        "cosine": float(torch.cosine_similarity(expected_V, reverse_V, 0)) if length > EXACT else None,
    }


def _over_draws(values: Sequence[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    return {"smallest": min(known), "median": median(known), "largest": max(known)} if known else None


def _finding(measured: Mapping[str, dict[str, float] | None]) -> str:
    def vanishes(key: str) -> bool:
        entry = measured[key]
        return entry is not None and entry["largest"] < EXACT

    if vanishes("length"):
        return "zero"
    if vanishes("reverse_error"):
        return "exact"
    return "forward" if vanishes("forward_error") else "biased"


# training runs


@dataclass(frozen=True, slots=True, kw_only=True)
class KlRun(StudyRun):
    """One training run. rate: a name of RATES, or the system of a model's recipe. estimator: one of TRAINED, or of
    MODEL_TRAINED."""

    rate: str
    estimator: str


def run_study(
    out: Path,
    start: str | ModelRecipe | None,
    steps: int,
    seeds: Sequence[int],
    run_command: Callable[[list[str]], None],
) -> None:
    """Write the whole study into the folder `out`. start: a folder of the demo, None to make one, or a model with its
    recipe. run_command: run a command of the demo from its arguments."""
    check_out(out)
    seeds = sorted(set(seeds))
    if isinstance(start, ModelRecipe):
        cases, score = make_model_cases(out, start, steps, seeds), "f1"
        begin = f"{cases[0].recipe.model.path} by {start.path}"
    else:
        world, score = Path(start or out / "start"), "em"
        cases, begin = make_cases(out, world, steps, seeds), str(world)
    for case in cases:  # refuse conflicting settings before computing anything
        check_folder(case)
    recipe, label = cases[0].recipe, score.upper()
    unfinished = sum(not (case.folder / "summary.json").exists() for case in cases)
    if isinstance(start, ModelRecipe) and unfinished and not load_task(recipe).held_out:
        raise UserError(f"{start.path}: names no held-out questions to answer before and after; set data.dev")
    if isinstance(start, str):
        check_start(world)
    estimators = " and ".join(dict.fromkeys(case.estimator for case in cases))
    rates = " and ".join(dict.fromkeys(f"{case.recipe.optim.lr:g}" for case in cases))
    console.console.print(
        f"study kl: curves, enumeration, then {len(cases)} runs of {steps} steps ({unfinished * steps} steps to do) "
        f"from {begin} ({estimators}, beta {recipe.grpo.beta:g}, learning rate {rates}, seed "
        f"{' and '.join(map(str, seeds))}), into {out}",
        soft_wrap=True,
    )
    started = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    draw_kl_curves(curves(), out / "curves.png")
    rows = enumerate_all()
    write_json(out / "enumeration.json", {"policies": DRAWS, "outcomes": OUTCOMES, "dtype": "float64", "rows": rows})
    draw_kl_enumeration(rows, out / "enumeration.png")
    print_enumeration(rows)
    if start is None:
        stages = demo.stages(world, demo.DemoPlan(seed=START_SEED))
        run_stages((stage for stage in stages if stage[0] not in ("train", "report")), run_command)

    def say(record: Mapping[str, Any]) -> str:
        return f"{label} {record[score]:.2f}  largest coefficient {record.get('kl_coefficient_largest', 0.0):,.1f}"

    stopped = train_all(cases, "study kl", say, may_diverge=True)
    records = {case.name: steps_of(case) for case in cases}
    runs = [summary_of(case, records[case.name], stopped.get(case.name)) for case in cases]
    named = [({"rate": c.rate, "estimator": c.estimator, "seed": c.seed}, records[c.name]) for c in cases]
    write_jsonl(out / "pairs.jsonl", (head | record for head, steps in named for record in steps))
    draw_kl_training(runs, records, score, recipe.optim.max_grad_norm, out / "training.png")
    settings = {
        "start": begin,
        "system": recipe.need(SystemSection).name,
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
    write_json(out / "kl.json", {"settings": settings, "runs": runs})
    print_runs(runs, score, steps)
    console.console.print(f"{time.perf_counter() - started:.0f} s in all. Pictures and figures are in {out}")


def make_cases(out: Path, world: Path, steps: int, seeds: Sequence[int]) -> list[KlRun]:
    """Return every run, in training order: the runs of a pair together, seed by seed."""
    cases = []
    for seed, rate, estimator in itertools.product(seeds, RATES, TRAINED):
        overrides = [
            *SETTINGS,
            f"run.steps={steps}",
            f"run.eval_every={steps}",
            f"optim.lr={RATES[rate]}",
            f"grpo.kl_value={estimator}",
        ]
        typed = next(
            stage for stage in demo.stages(world, demo.DemoPlan(seed=seed, set=tuple(overrides))) if stage[0] == "train"
        )
        assigned = [value for flag, value in itertools.pairwise(typed) if flag == "--set"]
        folder = out / "runs" / f"{rate}-{estimator}-seed{seed}"
        recipe = read_run_recipe(typed[1], assigned)  # train RECIPE --set .. --set .. --out ..
        name = f"{rate} {estimator} seed {seed}"
        cases.append(KlRun(name=name, rate=rate, estimator=estimator, seed=seed, folder=folder, recipe=recipe))
    return cases


def make_model_cases(out: Path, chosen: ModelRecipe, steps: int, seeds: Sequence[int]) -> list[KlRun]:
    """Return the runs of a pretrained model, at its recipe's learning rate and beta, or MODEL_BETA if beta is 0."""
    asked = chosen.read()
    rate = asked.need(SystemSection).name
    beta = [] if asked.grpo.beta else [f"grpo.beta={MODEL_BETA}"]
    cases = []
    for seed, estimator in itertools.product(seeds, MODEL_TRAINED):
        recipe = chosen.read(
            *SETTINGS,
            *beta,
            f"run.steps={steps}",
            f"run.eval_every={steps}",
            f"run.seed={seed}",
            f"grpo.kl_value={estimator}",
            f"grpo.kl_gradient={estimator}",
        )
        name = f"{rate} {estimator} seed {seed}"
        folder = out / "runs" / name.replace(" seed ", "-seed").replace(" ", "-")
        cases.append(KlRun(name=name, rate=rate, estimator=estimator, seed=seed, folder=folder, recipe=recipe))
    return cases


def check_start(world: Path) -> None:
    """Raise UserError unless the folder has the input of the training stage of `thresher demo`."""
    for name in ("data/train.jsonl", "data/test.jsonl", "index", "warmup"):
        if not (world / name).exists():
            raise UserError(
                f"{world / name}: no such file or folder; give --start a folder that `thresher demo` wrote, or leave "
                "it out, and the study makes its own"
            )


def steps_of(case: KlRun) -> list[dict[str, Any]]:
    """Return the LOGGED figures of every step of a run."""
    records = read_metrics(case.folder)
    return [{key: record.get(key) for key in ("step", *LOGGED)} for record in records if "eval" not in record]


def summary_of(case: KlRun, steps: Sequence[Mapping[str, Any]], stopped: str | None) -> dict[str, Any]:
    """Return a run in one record: the maxima of figures that can explode, and final mean KL, reward and scores."""

    def known(key: str) -> list[float]:
        return [step[key] for step in steps if step[key] is not None]

    greedy = [record["eval"] for record in read_metrics(case.folder) if "eval" in record]
    late = {"kl": "kl_k1", "reward": "reward", **{f"{score}_sampled": score for score in SCORES}}
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
        **{f"{score}_before": greedy[0][score] for score in SCORES},
        **{f"{score}_after": greedy[-1][score] if len(greedy) > 1 else None for score in SCORES},
        **{name: mean(known(key)[-LAST:]) if known(key) else None for name, key in late.items()},
        "stopped": stopped,
    }


def print_enumeration(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print medians over the policies, and the finding about the gradient over all of them."""
    words = {"exact": "exact", "zero": "zero", "forward": "KL(ref||pi)'s", "biased": "biased"}
    console.table(
        f"Expectation against KL(pi||ref), enumerated: relative error, median of {DRAWS} policies",
        ("estimator", "policy", "value", "gradient", "cosine", "gradient is"),
        [
            (
                estimator_label(row),
                row["sampled"].removesuffix(" policy"),
                f"{row['value_error']['median']:.1e}",
                f"{row['reverse_error']['median']:.1e}",
                "-" if row["cosine"] is None else f"{row['cosine']['median']:.2f}",
                words[row["finding"]],
            )
            for row in rows
        ],
    )


def print_runs(runs: Sequence[Mapping[str, Any]], score: str, steps: int) -> None:
    """Print a line for each learning rate and estimator: the mean over seeds, and the range below it."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        groups.setdefault(f"{run['rate']} {run['estimator']}", []).append(run)
    keys = ("kl_largest", "kl_coefficient_largest", "grad_norm", "kl", "reward", f"{score}_after", f"{score}_sampled")
    label, rates = score.upper(), ", ".join(dict.fromkeys(f"{run['rate']} {run['lr']:g}" for run in runs))
    console.table(
        f"GRPO, {steps} steps, learning rate {rates}: largest of a run; at its end; mean and range of seeds",
        ("", "token KL", "|dKL/dlogp|", "grad norm", "mean KL", "reward", f"{label} greedy", f"{label} sampled"),
        [(name, *(_mean_and_range([run[key] for run in group]) for key in keys)) for name, group in groups.items()],
    )
    capped = sum(run["capped"] for run in runs)
    console.console.print(
        f"{label} before, greedy: {runs[0][f'{score}_before']:.3f}. Tokens whose exponent was capped: {capped:,}."
    )
    for run in runs:
        if run["stopped"]:
            console.console.print(f"{run['name']} stopped: {run['stopped']}", markup=False)


def _mean_and_range(values: Sequence[float | None]) -> str:
    """Return the mean, and the range on a line below if the values differ."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    low, high = _rounded(min(known)), _rounded(max(known))
    return _rounded(mean(known)) + ("" if low == high else f"\n{low}–{high}")


def _rounded(value: float) -> str:
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"
