"""`thresher compare`: paired differences between two evaluations of the same questions, for each measure.

    folder A, folder B  ->  questions matched by id  ->  B - A, its 95% interval, a p-value   (rewards/statistics.py)
    folders A0, A1, .. and B0, B1, ..  ->  one pair per seed, the means of each  ->  the same over seeds

It also compares evidence with and without reasoning: among the questions whose passages contain a gold string in both
runs, the share whose gold is recalled by the text of only one run. p-values are not corrected.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from thresher.common.errors import UserError
from thresher.common.records import read_object, read_records
from thresher.engine.evaluation.metrics import NAMES, RECALLS, shown
from thresher.rewards.statistics import compare_paired, compare_seeds, least_p, overlap

Measures = Mapping[str, float | None]

LARGEST = 1e100  # limit of a measure, because squares are summed
ACROSS = frozenset({"recall_evidence", "recall_rationale"})


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A folder of `thresher eval`: its metrics.json, and each question's text, measures and parts of the reward by
    id."""

    path: Path
    figures: dict[str, Any]
    questions: dict[str, str]
    measures: dict[str, Measures]
    parts: dict[str, Measures] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.figures.get("baseline") or self.figures.get("system") or self.path.name)

    @property
    def rewarded_by(self) -> str | None:
        """Return the reward function and its switches; the system's name if the folder does not record them."""
        return self.figures.get("rewarded_by") or self.figures.get("system")


def read_evaluation(path: str | Path, unverified: bool = False) -> Evaluation:
    """Read a finished evaluation. UserError for any other folder, for a question without measures and, unless
    `unverified`, for files that were changed after they were written."""
    path = Path(path)
    if not (path / "metrics.json").is_file():
        state = "an unfinished evaluation" if (path / "settings.json").is_file() else "no evaluation"
        raise UserError(f"{path}: holds {state} (no metrics.json); name a folder that `thresher eval` has finished")
    questions: dict[str, str] = {}
    measures: dict[str, Measures] = {}
    parts: dict[str, Measures] = {}
    figures = read_object(path / "metrics.json", unverified=unverified)
    mark = figures.get("trajectories")
    for number, record in read_records(path / "trajectories.jsonl", unverified=unverified, expected=mark):
        found, terms = record.get("measures"), record.get("parts")
        where = f"{path / 'trajectories.jsonl'}: line {number}"
        if not isinstance(found, dict) or not isinstance(terms, dict):
            raise UserError(f"{where} has no measures; evaluate again with this version")
        for key, values in (("measures", found), ("parts", terms)):
            for name, value in values.items():
                if not (value is None or (isinstance(value, int | float) and abs(value) < LARGEST)):
                    raise UserError(
                        f"{where}: {key}.{name}: expected a number or null, got {str(value)[:80]}; evaluate again"
                    )
        id_ = str(record.get("id"))
        questions[id_] = str(record.get("question"))
        measures[id_], parts[id_] = found, terms
    return Evaluation(path, figures, questions, measures, parts)


def compare(first: Evaluation, second: Evaluation) -> dict[str, Any]:
    """Return the content of compare.json. UserError if the two share no question, or one id has two questions."""
    ids = [id_ for id_ in first.measures if id_ in second.measures]
    if not ids:
        raise UserError(f"{first.path} and {second.path}: no question is in both; compare runs on the same questions")
    for id_ in ids:
        if first.questions[id_] != second.questions[id_]:
            raise UserError(f"question {id_} of {second.path} is another in {first.path}; give them different ids")
    differences = {}
    incomparable = _incomparable(first, second)
    in_first, in_second = ({name for id_ in ids for name in run.measures[id_]} for run in (first, second))
    for name in NAMES:
        if name in incomparable or name not in in_first & in_second:
            continue
        a, b = ([run.measures[id_].get(name) for id_ in ids] for run in (first, second))
        if (found := compare_paired(a, b)) is not None:
            differences[name] = asdict(found)
    return {
        "first": _described(first),
        "second": _described(second),
        "matched": len(ids),
        "only_in_first": len(first.measures) - len(ids),
        "only_in_second": len(second.measures) - len(ids),
        "differences": differences,
        "recalled": _recalled(first, second, ids),
        "notes": _notes(first, second, len(ids), set(differences), incomparable),
    }


def compare_over_seeds(firsts: Sequence[Evaluation], seconds: Sequence[Evaluation]) -> dict[str, Any]:
    """Compare pairs of evaluations, one pair per seed. The result is as in `compare`: differences are over the pairs,
    shares of recalled golds are means, "pairs" has the comparison of each pair, and "seeds" their number.

    firsts, seconds: in the same order; at least one side has two or more. A single evaluation of a side that no seed
    changes is paired with each of the other. UserError for other numbers, a folder named twice, and as in `compare`."""
    count = max(len(firsts), len(seconds))
    if not {len(firsts), len(seconds)} <= {1, count}:
        raise UserError(
            f"compare: {len(firsts)} evaluations of the first against {len(seconds)} of the second; name one per "
            "seed of each, or a single one of a side that no seed changes"
        )
    for side in (firsts, seconds):
        folders = [run.path.resolve() for run in side]
        if twice := [run.path for run, folder in zip(side, folders, strict=True) if folders.count(folder) > 1]:
            raise UserError(f"compare: {twice[0]} is named twice; name the evaluation of another seed")
    alike = [list(side) * (count if len(side) == 1 else 1) for side in (firsts, seconds)]
    pairs = [compare(first, second) for first, second in zip(*alike, strict=True)]
    differences = {
        name: asdict(
            compare_seeds(*([pair["differences"][name][side] for pair in pairs] for side in ("first", "second")))
        )
        for name in pairs[0]["differences"]
        if all(name in pair["differences"] for pair in pairs)
    }
    notes = [
        f"{count} pairs, one per seed: means, intervals and p-values are over seeds. With {count} seeds no p is below "
        f"{least_p(count):.3g}."
    ]
    return {
        "first": pairs[0]["first"] | {"folders": [str(run.path) for run in firsts]},
        "second": pairs[0]["second"] | {"folders": [str(run.path) for run in seconds]},
        "seeds": count,
        "differences": differences,
        "recalled": _mean_shares([pair["recalled"] for pair in pairs]),
        "notes": [*notes, *dict.fromkeys(note for pair in pairs for note in pair["notes"])],
        "pairs": pairs,
    }


def _mean_shares(pairs: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the means of the overlaps that all pairs have; counts of questions are summed over the pairs."""
    found = []
    for row in pairs[0]:
        same = [one for rows in pairs for one in rows if (one["first"], one["second"]) == (row["first"], row["second"])]
        if len(same) == len(pairs):
            shares = {key: fmean(one[key] for one in same) for key in ("both", "only_first", "only_second", "neither")}
            found.append({**row, **shares, "count": sum(one["count"] for one in same)})
    return found


def markdown(result: Mapping[str, Any]) -> str:
    first, second = result["first"], result["second"]
    unit = "Seeds" if "seeds" in result else "Questions"
    lines = [
        f"# {second['name']} against {first['name']}",
        "",
        *(
            f"- {which}: {', '.join(side.get('folders', [side['folder']]))} ({side['name']}, {side['model']})"
            for which, side in (("First", first), ("Second", second))
        ),
        *(f"- {note}" for note in result["notes"]),
        "",
        f"| Measure | | First | Second | Difference | 95% interval | p | {unit} | Test |",
        "|---|---|--:|--:|--:|:-:|--:|--:|---|",
    ]
    for key, *cells in difference_rows(result):
        lines.append(f"| {NAMES[key][0]} | `{key}` | {' | '.join(map(str, cells))} |")
    if result["recalled"]:
        lines += [
            "",
            "Questions whose passages hold a gold string in both runs, by whose text recalls it:",
            "",
            "| First's, second's text | Both | Only the first | Only the second | Neither | Questions |",
            "|---|--:|--:|--:|--:|--:|",
            *(f"| {' | '.join(map(str, row))} |" for row in recall_rows(result)),
        ]
    intervals = (
        "Student's, over seeds"
        if "seeds" in result
        else "paired bootstrap over questions, 10,000 resamples, of these two models and no other seed"
    )
    lines += ["", f"Intervals: {intervals}. Two-sided p-values, none corrected."]
    return "\n".join(lines) + "\n"


def _recalled(first: Evaluation, second: Evaluation, ids: Sequence[str]) -> list[dict[str, Any]]:
    """Return the overlap of the gold answers that two texts recall, for every meaningful pair of texts."""
    # Evidence cannot contain a gold that the passages lack. Questions with unknown passages are kept.
    known = [id_ for id_ in ids if all(run.measures[id_].get("recall_passages") != 0 for run in (first, second))]
    found = []
    for a, b in product(RECALLS, RECALLS):
        has = any(a in first.measures[id_] for id_ in known) and any(b in second.measures[id_] for id_ in known)
        if not has or (a != b and not {a, b} <= ACROSS):
            continue
        recalled = ([bool(run.measures[id_].get(n)) for id_ in known] for run, n in ((first, a), (second, b)))
        shares = overlap(*recalled)
        if shares is not None:
            found.append({"first": a, "second": b, **asdict(shares)})
    return found


JUDGED = {"entailment": ("entailment_judge", "Entailment"), "verdict": ("verdict_judge", "Answers")}


def _incomparable(first: Evaluation, second: Evaluation) -> dict[str, str]:
    """Return the measures that differ in meaning between the two runs, each with the reason."""
    found = {}
    if first.rewarded_by != second.rewarded_by:
        found["reward"] = "The two are rewarded differently: their rewards cannot be compared, and are left out."
    for name, (key, what) in JUDGED.items():
        one, other = (run.figures.get(key) for run in (first, second))
        has = all(any(name in measures for measures in run.measures.values()) for run in (first, second))
        if one != other and has:
            found[name] = f"{what} judged by {one} and {other}: their numbers cannot be compared, and are left out."
    return found


def _notes(
    first: Evaluation, second: Evaluation, matched: int, compared: set[str], incomparable: Mapping[str, str]
) -> list[str]:
    notes = [f"{matched:,} questions are in both runs."]
    for run, which in ((first, "first"), (second, "second")):
        if alone := len(run.measures) - matched:
            notes.append(f"{alone:,} questions are only in the {which} and are left out.")
    notes += [f"{what} judged by {first.figures.get(key)}." for name, (key, what) in JUDGED.items() if name in compared]
    return notes + list(incomparable.values())


def _described(run: Evaluation) -> dict[str, Any]:
    keys = ("system", "baseline", "model", "data", "noise", "temperature", "seed")
    return {"folder": str(run.path), "name": run.name} | {key: run.figures.get(key) for key in keys}


def difference_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return (key, first, second, difference, interval, p, questions, test) as text; shares differ in points."""
    rows: list[tuple[str, ...]] = []
    for key, found in result["differences"].items():
        scale, digits = (100, 1) if NAMES[key][1] == "share" else (1, 2)
        low, high = (f"{scale * end:+,.{digits}f}" if end is not None else "" for end in (found["low"], found["high"]))
        between = f"{low} to {high}" if low else "-"
        rows.append(
            (
                key,
                shown(key, found["first"]),
                shown(key, found["second"]),
                f"{scale * found['difference']:+,.{digits}f}" + (" pts" if scale == 100 else ""),
                between,
                f"{found['p']:.3g}" if found["p"] >= 1e-4 else "< 0.0001",
                f"{found['count']:,}",
                found["test"],
            )
        )
    return rows


def recall_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            f"{row['first'].removeprefix('recall_')}, {row['second'].removeprefix('recall_')}",
            *(f"{row[key]:.1%}" for key in ("both", "only_first", "only_second", "neither")),
            f"{row['count']:,}",
        )
        for row in result["recalled"]
    ]
