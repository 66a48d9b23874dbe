"""`thresher compare-methods FILE`: methods x conditions x seeds from one file, at equal computed tokens.

    prepare   commands of the file, once, or once per seed if they contain {seed}    data, an index, a base
    NAME.command, next to each folder that such a command made                       the command
    runs/     low-gigpo-seed0/ .. low-gigpo-control-seed0/ ..                        ordinary run folders
    rows/     low-gigpo-seed0.json ..                                                results of finished runs
    rows.jsonl, table.md, curves.png, methods.json

Every run has the recipe's settings, then those of the file, of its condition and of its method, and ends by
run.token_budget at the largest budget. A control is the same run with the file's `control` settings, such as shuffled
rewards. Runs of a seed have the same base and the same questions in the same order, so that methods are compared in
pairs, one pair per seed. A run whose numbers are no longer finite ends there, and its last evaluation counts from there
on.

Several processes may run the same command: each takes a run that no other has taken, so that one process per GPU, or
per core, shares the work. A process that is killed loses the steps of its run since its last checkpoint.

The analysis was fixed before any run: the measure on the held-out questions at each budget, interpolated linearly over
tokens between the neighbouring evaluations. For a method minus the baseline, or minus its own control

    seeds        the differences, one per seed; their mean; Student's 95% interval
    interval     two-way bootstrap: 2.5% and 97.5% of means over seeds and questions, both drawn with replacement
    MDE          minimum detectable effect of a paired t-test over these seeds at 5%, with a power of .8
    p, Holm      a sign flip test over seeds; the same by Holm's correction for all methods of that condition and budget

A difference is claimed if Holm's p is at most .05, the interval is on one side of 0, and the difference is at least the
MDE. The last is strict: a true difference as large as the MDE is claimed in about half of the cases. At equal seconds
nothing is claimed.

Axes: S seeds, Q questions.
"""

import json
import re
import shlex
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from thresher.bench.studies.runs import StudyRun, check_folder, check_out, head_of, is_made, write_json
from thresher.common import console
from thresher.common.errors import UserError
from thresher.common.files import atomic_write_text, read_bytes, read_json_object
from thresher.common.jsonl import iter_jsonl, write_jsonl
from thresher.common.locks import Held, locked_file, share_work
from thresher.common.records import read_records
from thresher.engine.assemble import read_run_recipe
from thresher.engine.config.recipe import Recipe
from thresher.engine.config.tables import FieldError, Section, from_dict
from thresher.engine.store.run_folder import SPENT, RunFolder, step_name, to_be_resumed, tokens_spent
from thresher.engine.training.step import Diverged
from thresher.engine.training.train import Progress, train
from thresher.rewards.statistics import (
    MOST_SEEDS,
    compare_seeds,
    holm,
    least_p,
    minimum_detectable_effect,
    seed_interval,
    two_way_interval,
)

PARTS = ("rollout_seconds", "reward_seconds", "recompute_seconds", "update_seconds")  # of a step
LEVEL = 0.05
MOST_BYTES = 1 << 20  # of the file
NAME = re.compile(r"\w[^/\\\s]*")  # of methods and conditions
SHIPPED = Path(str(files("thresher.bench.studies"))) / "comparisons"


@dataclass(frozen=True, kw_only=True)
class Comparison(Section):
    """The file. In commands and settings, {out} is the folder; {seed}, {condition} and {method} are those of the
    run."""

    recipe: str
    methods: dict[str, Any]  # name -> settings, as of --set
    baseline: str  # the method that the others are compared with
    seeds: tuple[int, ...]
    budgets: tuple[int, ...]  # tokens, as run.token_budget counts them
    prepare: tuple[str, ...] = ()  # commands with --out, each writing one folder
    set: tuple[str, ...] = ()  # settings of all runs
    conditions: dict[str, Any] = field(default_factory=dict)  # name -> settings
    control: tuple[str, ...] = ()  # settings that turn a run into a control; none: no controls
    control_seeds: tuple[int, ...] | None = None  # seeds with a control; none: all
    measure: str = "em"  # em, f1 or reward, on data.dev
    shown: tuple[str, ...] = ("searches",)  # additional measures in the table

    def check(self) -> None:
        for table in ("methods", "conditions"):
            for name, texts in getattr(self, table).items():
                if not (isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts)):
                    raise FieldError(f"{table}.{name}", f"expected a list of settings as for --set, got {texts!r}")
                if not NAME.fullmatch(name):
                    raise FieldError(table, f"expected names such as lr-3, without / and spaces, got {name!r}")
        if self.baseline not in self.methods:
            raise FieldError("baseline", f"expected one of {', '.join(self.methods)}, got {self.baseline!r}")
        for name in ("seeds", "budgets"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values) or min(values) < (name == "budgets"):
                least = "numbers of at least 1" if name == "budgets" else "numbers"
                raise FieldError(name, f"expected one or more different {least}, got {list(values)}")
        if self.measure not in ("em", "f1", "reward"):
            raise FieldError("measure", f'expected "em", "f1" or "reward", got {self.measure!r}')
        if stray := set(self.control_seeds or ()) - set(self.seeds):
            raise FieldError("control_seeds", f"expected some of seeds, got {sorted(stray)}")
        for name, count in Counter(run.name for run in runs_of(self)).items():
            if count > 1:
                raise FieldError(
                    "methods", f"two runs would be called {name}; give a method or a condition another name"
                )


@dataclass(frozen=True, slots=True)
class Run:
    """A training run of the comparison."""

    seed: int
    condition: str  # "" if the file has none
    method: str
    control: bool

    @property
    def name(self) -> str:
        words = [self.condition, self.method, "control" if self.control else "", f"seed{self.seed}"]
        return "-".join(filter(None, words))


@dataclass(frozen=True, slots=True)
class Job:
    """A piece of work for one process. out: the path to lock; after: jobs that must be done before."""

    name: str
    out: Path
    done: Callable[[], bool]
    run: Callable[[], None]
    after: tuple["Job", ...] = ()


def read_comparison(
    path: str | Path,
    seeds: Sequence[int] | None = None,
    budgets: Sequence[int] | None = None,
    overrides: Sequence[str] = (),
) -> Comparison:
    """Read the file, or the one with this name that is part of Thresher. seeds, budgets: replace the file's. overrides:
    appended to its settings. UserError if it is not TOML, or if a key is unknown, missing or of a wrong type."""
    path = Path(path)
    if not path.exists() and path.parent == Path() and (SHIPPED / path).is_file():
        path = SHIPPED / path
    content = read_bytes(path, MOST_BYTES)
    try:
        tables = tomllib.loads(content.decode("utf-8-sig"))
    except ValueError as error:
        raise UserError(f"{path}: expected a comparison in TOML, but {error}; fix the file") from None
    plan = from_dict(Comparison, tables, str(path))
    if seeds is not None:
        kept = None if plan.control_seeds is None else tuple(set(seeds) & set(plan.control_seeds))
        plan = replace(plan, seeds=tuple(seeds), control_seeds=kept)
    return replace(plan, budgets=tuple(budgets or plan.budgets), set=(*plan.set, *overrides))


def run_comparison(
    plan: Comparison,
    out: Path,
    run_command: Callable[[list[str]], None],
    rows_file: str | Path | None = None,
    train_more: bool = True,
) -> dict[str, Any]:
    """Prepare and train what is not done yet, and write the comparison into `out`; return the content of methods.json.

    run_command: run a command from its arguments. rows_file: rows of runs that are not repeated. train_more: False
    compares only finished runs.
    """
    check_out(out)
    known: dict[str, dict[str, Any]] = {}
    for number, row in () if rows_file is None else iter_jsonl(rows_file):
        where = f"{rows_file}: line {number}"
        check_row(row, where, plan)
        if row["name"] in known:
            raise UserError(f"{where}: the run {row['name']} is in an earlier line too; leave one of them out")
        known[row["name"]] = row
    started, runs = time.perf_counter(), runs_of(plan)
    own = {run.name: out / "rows" / f"{run.name}.json" for run in runs if run.name not in known}
    jobs = jobs_of(plan, out, [run for run in runs if run.name in own], run_command)
    if train_more:
        for run in runs:  # refuse bad settings of any run before the first is trained
            case = study_run(plan, out, run)
            if run.name in own and own[run.name].exists():
                goes_on = (out / "runs" / run.name).is_dir()  # otherwise the whole run would be trained again
                check_row(read_json_object(own[run.name]), str(own[run.name]), plan, whole=not goes_on)
            check_folder(case, longer=True)
        work_through(jobs)
    rows = []
    for run in runs:
        if run.name in known:
            rows.append(known[run.name])
        elif own[run.name].exists():
            rows.append(read_json_object(own[run.name]))
            check_row(rows[-1], str(own[run.name]), plan)
    if not rows:
        raise UserError(f"{out}: no run is finished; run the command without --finished")
    _check_questions(rows)
    out.mkdir(parents=True, exist_ok=True)
    write_jsonl(out / "rows.jsonl", rows)
    found = analysis(plan, rows) | {"seconds": time.perf_counter() - started}
    from thresher.bench.plots import draw_methods  # importing matplotlib takes a second

    draw_methods(rows, plan.measure, max(plan.budgets), out / "curves.png")
    text = markdown(plan, found)
    atomic_write_text(out / "table.md", text)
    write_json(out / "methods.json", found)
    console.console.print(text, markup=False, soft_wrap=True)
    return found


def check_row(row: Mapping[str, Any], where: str, plan: Comparison, *, whole: bool = True) -> None:
    """Raise UserError if a row differs from its run in format, measure, recipe, commands or settings. If `whole`, also
    raise it for a row that lacks a measure of `shown` or does not reach the largest budget. where: its place, named
    first."""
    if not (isinstance(row.get("curve"), list) and row["curve"]) or row.get("measure") != plan.measure:
        raise UserError(f"{where}: expected a row of compare-methods with the measure {plan.measure!r}")
    if {"recipe": row.get("recipe"), "prepare": row.get("prepare")} != origin_of(plan):
        raise UserError(
            f"{where}: its run had another recipe, or other commands in prepare; leave it out, or choose another --out"
        )
    run = next((run for run in runs_of(plan) if run.name == row.get("name")), None)
    try:
        is_its_own = run is None or all(row[key] == value for key, value in asdict(run).items())
        for point in row["curve"]:
            numbers = (point["tokens"], point["seconds"], point[plan.measure])
            if not all(isinstance(number, int | float) for number in numbers) or not unpacked(point["questions"]):
                raise ValueError(f"the evaluation {point}"[:80])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{where}: expected a row as compare-methods writes it ({type(error).__name__}: {error}); leave it out; a "
            "file in rows/ that is deleted is made again from its run"
        ) from None
    if not is_its_own:
        raise UserError(f"{where}: its name is {row['name']}, but its seed, condition, method or control differs")
    if run is not None and row.get("settings") != (expected := settings_of(plan, run)):
        other = next((text for text in expected if text not in (row.get("settings") or ())), "fewer")
        raise UserError(f"{where}: its run had other settings than the file has now ({other}); choose another --out")
    if whole and (absent := _absent(row, plan)):
        raise UserError(f"{where}: its evaluations have no {absent}, which shown lists; take it out of shown")
    if whole and not _reaches(row, plan):
        raise UserError(
            f"{where}: its run ended at {row['curve'][-1]['tokens']:,} tokens, below the largest of budgets, "
            f"{max(plan.budgets):,}; leave the row out, or that budget"
        )


def _reaches(row: Mapping[str, Any], plan: Comparison) -> bool:
    return "diverged" in row or bool(row["curve"][-1]["tokens"] >= max(plan.budgets))


def _absent(row: Mapping[str, Any], plan: Comparison) -> str | None:
    return next((name for name in plan.shown if any(name not in point for point in row["curve"])), None)


def _check_questions(rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise UserError if runs of one condition were evaluated on different questions, whatever their seeds: the
    interval draws questions for all seeds at once. Rows of earlier versions only have the number of questions."""
    first: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        numbers = {len(unpacked(point["questions"])) for point in row["curve"]}
        same = first.setdefault(row["condition"], row)
        known = {one["asked"] for one in (row, same) if "asked" in one}
        if len(known) > 1 or numbers != {len(unpacked(same["curve"][0]["questions"]))}:
            raise UserError(
                f"{row['name']}: was evaluated on other questions than {same['name']}; give all seeds the same "
                "data.dev, choose another --out for another file, or leave the row out"
            )


def origin_of(plan: Comparison) -> dict[str, str]:
    """Return the row entries about the file besides its settings: the recipe's name, and a digest of `prepare`."""
    return {"recipe": plan.recipe, "prepare": sha256("\n".join(plan.prepare).encode()).hexdigest()[:16]}


# Runs


def runs_of(plan: Comparison) -> list[Run]:
    """Return every run, all those of a seed before the next one's."""
    controls = set(plan.seeds if plan.control_seeds is None else plan.control_seeds) if plan.control else set()
    return [
        Run(seed, condition, method, control)
        for seed in plan.seeds
        for condition in plan.conditions or ("",)
        for method in plan.methods
        for control in ((False, True) if seed in controls else (False,))
    ]


def jobs_of(plan: Comparison, out: Path, runs: Sequence[Run], run_command: Callable[[list[str]], None]) -> list[Job]:
    """Return the commands that these runs need and the runs, each after the jobs that it needs."""
    made: dict[str, Job] = {}  # by the filled command, so that one without {seed} is one job
    jobs: list[Job] = []
    for run in runs:
        before: list[Job] = []
        for text in plan.prepare:
            if (typed := filled(text, out, run)) not in made:
                made[typed] = _command(typed, filled(text, Path("{out}"), run), tuple(before), run_command)
                jobs.append(made[typed])
            before.append(made[typed])
        jobs.append(_training(plan, out, run, tuple(before)))
    return jobs


def filled(text: str, out: Path, run: Run) -> str:
    """Return a command or a setting of the file for a run."""
    values = {"out": out, "seed": run.seed, "condition": run.condition, "method": run.method}
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


def _command(typed: str, as_written: str, after: tuple[Job, ...], run_command: Callable[[list[str]], None]) -> Job:
    """Return the job of a command. UserError if its folder was made by another one. as_written: with {out}."""
    words = shlex.split(typed)
    if "--out" not in words[:-1]:
        raise UserError(f"prepare: expected a command with --out FOLDER, got {typed}")
    into = Path(words[words.index("--out") + 1])
    record = into.with_name(f"{into.name}.command")
    if into.exists() and record.exists() and (before := record.read_text("utf-8").strip()) != as_written:
        raise UserError(
            f"{into}: made by another command than the file has now ({before}); choose another --out, or restore it"
        )

    def run() -> None:
        again = [*words, *(["--resume"] if to_be_resumed(words[0], into) else [])]
        console.console.print(f"$ thresher {shlex.join(again)}", style="bold", markup=False, soft_wrap=True)
        run_command(again)
        atomic_write_text(record, as_written + "\n")

    return Job(into.name, into, lambda: is_made(words[0], into), run, after)


def settings_of(plan: Comparison, run: Run) -> list[str]:
    """Return a run's settings as the file has them, without its seed and budget."""
    own = [*plan.conditions.get(run.condition, ()), *plan.methods[run.method], *(plan.control if run.control else ())]
    return [*plan.set, *own]


def recipe_of(plan: Comparison, out: Path, run: Run) -> Recipe:
    settings = [*settings_of(plan, run), f"run.seed={run.seed}", f"run.token_budget={max(plan.budgets)}"]
    recipe = read_run_recipe(plan.recipe, [filled(text, out, run) for text in settings])
    if recipe.data is None or recipe.data.dev is None:
        raise UserError(f"{plan.recipe}: expected held-out questions to compare the methods on; set data.dev")
    return recipe


def study_run(plan: Comparison, out: Path, run: Run) -> StudyRun:
    """Return a run with its folder and its recipe."""
    return StudyRun(name=run.name, seed=run.seed, folder=out / "runs" / run.name, recipe=recipe_of(plan, out, run))


def _training(plan: Comparison, out: Path, run: Run, after: tuple[Job, ...]) -> Job:
    folder, row = out / "runs" / run.name, out / "rows" / f"{run.name}.json"

    def train_it() -> None:
        case = study_run(plan, out, run)
        check_folder(case, longer=True)
        with console.stage(run.name, case.recipe.run.steps) as line:

            def watch(progress: Progress) -> None:
                if not progress.record:
                    line.from_before(progress.step)
                elif "eval" not in progress.record:
                    line.total = progress.steps
                    line.to(progress.step, f"reward {progress.record['reward']:.3f}")

            try:
                train(case.recipe, folder, folder.exists(), watch)  # a finished run continues to a larger budget
                diverged = {}
            except Diverged as error:
                diverged = {"diverged": str(error)}
        found = row_of(plan, run, RunFolder(folder)) | diverged
        if not _reaches(found, plan):
            raise UserError(
                f"{folder}: ended after run.steps = {found['steps']} with {found['curve'][-1]['tokens']:,} tokens, "
                f"below the largest of budgets, {max(plan.budgets):,}; set a larger run.steps"
            )
        row.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(row, json.dumps(found) + "\n")
        first, last = found["curve"][0], found["curve"][-1]
        console.console.print(
            f"{run.name}: {plan.measure} {first[plan.measure]:.3f} -> {last[plan.measure]:.3f} in {found['steps']} "
            f"steps, {last['tokens']:,} tokens, {last['seconds']:.0f} s{', diverged' if diverged else ''}",
            soft_wrap=True,
        )

    def done() -> bool:
        return row.exists() and _reaches(found := read_json_object(row), plan) and not _absent(found, plan)

    return Job(run.name, folder, done, train_it, after)


def work_through(jobs: Sequence[Job]) -> None:
    """Do all jobs in order, skipping those that another process is doing, and return once all are done."""
    with console.progress_line("compare-methods", len(jobs)) as line:
        open_jobs = [job for job in jobs if not job.done()]
        line.from_before(len(jobs) - len(open_jobs))

        def attempt(job: Job) -> bool:
            if not (job.done() or _taken(job)):
                return False
            line.to(line.done + 1, job.name)
            return True

        share_work(open_jobs, attempt)


def _taken(job: Job) -> bool:
    """Do the job unless another process does it or an earlier job is not done; return whether it is done."""
    if not all(one.done() for one in job.after):
        return False
    job.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with locked_file(job.out, "run"):
            if not job.done():
                job.run()
    except Held:
        return False
    return True


def row_of(plan: Comparison, run: Run, folder: RunFolder) -> dict[str, Any]:
    """Return a finished run in one record.

    Tokens are sums over its steps, zero_advantage_groups the mean number of groups per step without a signal. asked: a
    digest of the last evaluation's questions. curve: for each evaluation the step, the tokens and seconds until then,
    the measures, and the measure of each question; seconds are those of rollouts, rewards and updates.
    """
    curve: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    asked = ""
    for record in folder.metrics():
        if "eval" not in record:
            steps.append(record)
            continue
        measures = record["eval"]
        path = folder.evaluations / f"{step_name(record['step'])}.jsonl"
        answers = [one for _, one in read_records(path, remedy="put a copy back")]
        questions = [[one.get(key) for key in ("id", "question", "golden_answers")] for one in answers]
        asked = sha256(json.dumps(questions).encode()).hexdigest()[:16]
        curve.append(
            {
                "step": record["step"],
                "tokens": tokens_spent(steps),
                "seconds": round(sum(step.get(part) or 0.0 for step in steps for part in PARTS), 2),
                **{name: measures.get(name, measures["parts"].get(name)) for name in (plan.measure, *plan.shown)},
                "questions": packed([measure_of(one, plan.measure) for one in answers]),
            }
        )
    return {
        **head_of(folder),
        "study": "methods",
        "name": run.name,
        **asdict(run),
        "measure": plan.measure,
        **origin_of(plan),
        "settings": settings_of(plan, run),
        "asked": asked,
        "steps": len(steps),
        **{kind: sum(step.get(kind) or 0 for step in steps) for kind in SPENT},
        "zero_advantage_groups": round(fmean(step["zero_advantage_groups"] for step in steps), 3) if steps else None,
        "curve": curve,
    }


def measure_of(record: Mapping[str, Any], name: str) -> float:
    """Return a trajectory's reward, or a part of it. UserError if the reward has no such part."""
    if name != "reward" and name not in record["parts"]:
        parts = ", ".join(record["parts"])
        raise UserError(f'measure: the reward measures no {name}, only {parts}; set measure = "reward" in the file')
    return float(record["reward"] if name == "reward" else record["parts"][name])


def packed(values: Sequence[float]) -> str | list[float]:
    """Return the questions' values for a row: a list, or hexadecimal digits of bits if all are 0 or 1. A leading 1
    comes before the bits."""
    if all(value in (0.0, 1.0) for value in values):
        return f"{int('1' + ''.join(str(int(value)) for value in values), 2):x}"
    return [round(value, 4) for value in values]


def unpacked(stored: str | Sequence[float]) -> list[float]:
    """Return the values that were given to `packed`."""
    return [float(bit) for bit in f"{int(stored, 16):b}"[1:]] if isinstance(stored, str) else list(stored)


# Analysis


def between(
    curve: Sequence[Mapping[str, Any]], axis: str, at: float, read: Callable[[Any], list[float]]
) -> list[float]:
    """Return numbers of a curve at a position of an axis, interpolated linearly between the adjacent evaluations. After
    the last evaluation, its numbers are returned."""
    for before, behind in pairwise(curve):
        if before[axis] <= at <= behind[axis] and behind[axis] > before[axis]:
            share = (at - before[axis]) / (behind[axis] - before[axis])
            return [a + share * (b - a) for a, b in zip(read(before), read(behind), strict=True)]
    return read(curve[-1])


def _mean_between(curve: Sequence[Mapping[str, Any]], axis: str, at: float, name: str) -> float:
    return between(curve, axis, at, lambda point: [point[name]])[0]


def analysis(plan: Comparison, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the tables: by condition and token budget, and by condition at equal seconds. The seconds are those of the
    run that took the fewest."""
    tables = []
    for condition in plan.conditions or {"": ()}:
        own = [row for row in rows if row["condition"] == condition]
        if own:
            tables += [_table(plan, own, condition, "tokens", budget) for budget in sorted(plan.budgets)]
            whole = [row for row in own if "diverged" not in row] or own
            fewest = min(row["curve"][-1]["seconds"] for row in whole)
            tables.append(_table(plan, own, condition, "seconds", fewest))
    return {
        "measure": plan.measure,
        "baseline": plan.baseline,
        "runs": len(rows),
        "of": len(runs_of(plan)),
        "commits": sorted({row.get("commit") or "no checkout" for row in rows}),
        "diverged": [row["name"] for row in rows if "diverged" in row],
        "tables": tables,
    }


def _table(plan: Comparison, rows: Sequence[Mapping[str, Any]], condition: str, axis: str, at: float) -> dict[str, Any]:
    runs = {(row["method"], row["control"], row["seed"]): row["curve"] for row in rows}
    lines = []
    for method in plan.methods:
        for control in (False, True):
            seeds = [seed for seed in plan.seeds if (method, control, seed) in runs]
            if not seeds:
                continue
            curves = [runs[method, control, seed] for seed in seeds]
            line: dict[str, Any] = {"method": method, "control": control, "seeds": seeds}
            line["values"] = [_mean_between(curve, axis, at, plan.measure) for curve in curves]
            for name in plan.shown:
                known = all(point[name] is not None for curve in curves for point in curve)
                line[name] = fmean(_mean_between(curve, axis, at, name) for curve in curves) if known else None
            if not control:
                pairs = {"baseline": (plan.baseline, False), "own control": (method, True)}
                for against, other in pairs.items():
                    if other != (method, False):
                        line[against] = _difference(runs, other, (method, False), seeds, axis, at)
            lines.append(line)
    # All planned differences count, also those without a run yet.
    for against, planned in (("baseline", len(plan.methods) - 1), ("own control", len(plan.methods))):
        found = [line[against] for line in lines if line.get(against)]
        p_values = [one["p"] for one in found] + [1.0] * (planned - len(found))
        for one, p in zip(found, holm(p_values), strict=False):
            one["holm"], one["least"] = p, planned * least_p(len(one["seeds"]))
            one["claimed"] = axis == "tokens" and claimed(one)
    return {"condition": condition, "axis": axis, "at": at, "lines": lines}


def _difference(
    runs: Mapping[tuple[str, bool, int], Sequence[Mapping[str, Any]]],
    first: tuple[str, bool],
    second: tuple[str, bool],
    seeds: Iterable[int],
    axis: str,
    at: float,
) -> dict[str, Any] | None:
    """Return the second minus the first over the seeds that both have; None without any."""
    both = [seed for seed in seeds if (*first, seed) in runs]
    if not both:
        return None
    a, b = (
        [between(runs[(*one, seed)], axis, at, lambda point: unpacked(point["questions"])) for seed in both]
        for one in (first, second)
    )
    gaps_SQ = [[y - x for x, y in zip(*pair, strict=True)] for pair in zip(a, b, strict=True)]
    gaps = [fmean(one) for one in gaps_SQ]
    found = compare_seeds([fmean(one) for one in a], [fmean(one) for one in b])
    low, high = two_way_interval(gaps_SQ)
    return {
        "seeds": both,
        "gaps": gaps,
        "difference": found.difference,
        "student": None if found.low is None else [found.low, found.high],
        "interval": [low, high],
        "mde": minimum_detectable_effect(gaps) if len(gaps) > 1 else None,
        "p": found.p,
    }


def claimed(found: Mapping[str, Any]) -> bool:
    """Return whether a difference is claimed, by the rule at the top of this file."""
    low, high = found["interval"]
    apart, seen = low > 0 or high < 0, found["mde"]
    return bool(found["holm"] <= LEVEL and apart and seen is not None and abs(found["difference"]) >= seen)


def verdict(method: str, other: str, found: Mapping[str, Any], measure: str) -> str:
    """Return in words what a difference shows."""
    gap, seeds = found["difference"], len(found["seeds"])
    if found["claimed"]:
        return f"{method} is {'above' if gap > 0 else 'below'} {other} by {abs(gap):.3f} (Holm's p {found['holm']:.3g})"
    if found["least"] > LEVEL:
        return f"{method} - {other}: {gap:+.3f}; {seeds} seed{'s' * (seeds > 1)} can support no claim"
    about = f"Holm's p {found['holm']:.3g}, MDE {found['mde']:.3f}"
    return f"{method} - {other}: {gap:+.3f}, no difference shown ({about})"


def markdown(plan: Comparison, found: Mapping[str, Any]) -> str:
    """Return all tables; those at equal tokens have one verdict per method."""
    parts = [f"{found['runs']} of {found['of']} runs, of {', '.join(found['commits'])}.", ""]
    if found["diverged"]:
        parts += [f"Diverged, and counted by their last evaluation: {', '.join(found['diverged'])}.", ""]
    for table in found["tables"]:
        where = f"{table['condition']}, " if table["condition"] else ""
        at = f"{table['at']:,.0f} {table['axis']}"
        parts += [f"## {where}{at}", "", *_lines(plan, table), ""]
        if table["axis"] == "tokens":
            parts += [*_verdicts(plan, table), ""]
    seeds = max(len(line["seeds"]) for table in found["tables"] for line in table["lines"])
    parts += [f"With {seeds} seeds no two-sided p is below {least_p(seeds):.3g} before Holm's correction."]
    if seeds > MOST_SEEDS:
        parts += [f"Student's intervals of more than {MOST_SEEDS} seeds are a little too wide."]
    return "\n".join(parts) + "\n"


def _lines(plan: Comparison, table: Mapping[str, Any]) -> list[str]:
    columns = ["method", "seeds", f"{plan.measure} of each seed", "mean", *plan.shown]
    columns += [f"minus {plan.baseline}", "seeds and questions", "MDE", "p, Holm"]
    columns += ["minus its control", "MDE", "p, Holm"] if plan.control else []
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for line in table["lines"]:
        name = f"{line['method']}, control" if line["control"] else line["method"]
        each = ", ".join(f"{value:.3f}" for value in line["values"])
        cells = [name, str(len(line["seeds"])), each, str(seed_interval(line["values"]))]
        cells += ["-" if line[name] is None else f"{line[name]:.2f}" for name in plan.shown]
        cells += _cells(line.get("baseline"), True)
        cells += _cells(line.get("own control"), False) if plan.control else []
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cells(found: Mapping[str, Any] | None, interval: bool) -> list[str]:
    if found is None:
        return ["-"] * (3 + interval)
    half = "" if found["student"] is None else f" ± {found['student'][1] - found['difference']:.3f}"
    low, high = found["interval"]
    return [
        f"{found['difference']:+.3f}{half}",
        *([f"{low:+.3f} to {high:+.3f}"] if interval else []),
        "-" if found["mde"] is None else f"{found['mde']:.3f}",
        f"{found['p']:.3g}, {found['holm']:.3g}",
    ]


def _verdicts(plan: Comparison, table: Mapping[str, Any]) -> list[str]:
    said = []
    for line in table["lines"]:
        for against, other in (("own control", "its control"), ("baseline", plan.baseline)):
            if found := line.get(against):
                said.append(f"- {verdict(line['method'], other, found, plan.measure)}.")
    return said
