"""`thresher compare`: questions matched by id, differences with their uncertainty, and golds that only one run
recalls."""

import json
from pathlib import Path
from typing import Any

import pytest

from thresher.cli import main as cli
from thresher.common.records import write_object, write_records
from thresher.engine.evaluation.compare import (
    Evaluation,
    compare,
    compare_over_seeds,
    difference_rows,
    read_evaluation,
)

Row = tuple[str, dict[str, float | None]]


def evaluation(folder: Path, rows: list[Row], **figures: Any) -> Path:
    """Write a finished evaluation with these questions and measures."""
    folder.mkdir()
    records = [{"id": id_, "question": f"Who is {id_}?", "parts": {}, "measures": measures} for id_, measures in rows]
    mark = write_records(folder / "trajectories.jsonl", records)
    facts = {"system": "eviomni", "baseline": None, "model": "m", "data": "d"}
    facts |= {"noise": 0, "temperature": 0.0, "seed": 0}
    write_object(folder / "metrics.json", {**facts, **figures, "trajectories": mark})
    return folder


def test_differences_of_the_questions_in_both(tmp_path: Path, capsys: Any) -> None:
    first = evaluation(tmp_path / "a", [(str(n), {"em": 0.0, "compression": 4.0, "f1": 0.5}) for n in range(6)])
    # In another order, with one question less and two more; better on five of five.
    rows: list[Row] = [(str(n), {"em": 1.0, "compression": None if n else 9.0}) for n in (4, 3, 2, 1, 0, 8, 9)]
    second = evaluation(tmp_path / "b", rows, system="arena")
    assert cli.run(["compare", str(first), str(second), "--out", str(tmp_path / "out" / "here")]) == 0
    result = json.loads((tmp_path / "out" / "here" / "compare.json").read_text())
    assert (result["matched"], result["only_in_first"], result["only_in_second"]) == (5, 1, 2)
    em = result["differences"]["em"]
    assert (em["first"], em["second"], em["difference"], em["low"], em["high"]) == (
        0.0,
        1.0,
        1.0,
        None,
        None,
    )  # one value
    assert em["p"] == pytest.approx(2 / 32) and em["count"] == 5
    compression = result["differences"]["compression"]  # over the one question where both have a value
    assert (compression["first"], compression["second"], compression["count"]) == (4.0, 9.0, 1)
    assert "f1" not in result["differences"] and result["recalled"] == []
    page = (tmp_path / "out" / "here" / "compare.md").read_text()
    assert "| Exact match | `em` | 0.0% | 100.0% | +100.0 pts | - | 0.0625 | 5 | exact sign test |" in page
    assert "2 questions are only in the second" in page and "rewards cannot be compared" in page
    printed = capsys.readouterr().out
    assert "5 questions are in both runs." in printed and "│ em " in printed


def test_rewards_compare_where_function_and_switches_are_the_same(tmp_path: Path) -> None:
    def noted(folder: str, first: dict[str, Any], second: dict[str, Any]) -> bool:
        (tmp_path / folder).mkdir()
        runs = [
            read_evaluation(evaluation(tmp_path / folder / name, [("0", {"em": 1.0, "reward": 2.0})], **figures))
            for name, figures in (("a", first), ("b", second))
        ]
        result = compare(*runs)
        without = "reward" not in result["differences"]
        assert without == any("rewards cannot be compared, and are left out" in note for note in result["notes"])
        return without

    lear, cot = {"system": "lear", "rewarded_by": "r, {}"}, {"system": None, "baseline": "cot", "rewarded_by": "em, {}"}
    assert not noted("same", {"rewarded_by": "r, {}"}, lear)
    assert noted("switches", {"rewarded_by": "r, {'tau': 1}"}, lear)
    assert noted("baseline", cot, lear) and not noted("baselines", cot, cot | {"baseline": "direct"})
    assert noted("older", {"system": "arena"}, {"system": "lear"}) and not noted("old", {}, {})


def test_the_order_of_the_runs_turns_the_sign_alone(tmp_path: Path) -> None:
    a = read_evaluation(evaluation(tmp_path / "a", [(str(n), {"f1": n / 7}) for n in range(7)]))
    b = read_evaluation(evaluation(tmp_path / "b", [(str(n), {"f1": (n * n % 5) / 5}) for n in range(7)]))
    there, back = compare(a, b)["differences"]["f1"], compare(b, a)["differences"]["f1"]
    assert there["difference"] == pytest.approx(-back["difference"]) and there["difference"] != 0
    assert there["p"] == back["p"]


def test_what_only_one_of_two_texts_recalls(tmp_path: Path) -> None:
    """Vanilla evidence against rationale and rational evidence, on questions whose passages hold a gold."""
    vanilla = [(1, 1), (1, 0), (1, 0), (1, 1), (0, 1)]
    rational = [(1, 1, 1), (1, 1, 1), (1, 1, 0), (1, 0, 1), (1, 1, 1)]
    a: list[Row] = [(str(n), {"recall_passages": p, "recall_evidence": e}) for n, (p, e) in enumerate(vanilla)]
    b: list[Row] = [
        (str(n), {"recall_passages": p, "recall_evidence": e, "recall_rationale": r})
        for n, (p, e, r) in enumerate(rational)
    ]
    result = compare(read_evaluation(evaluation(tmp_path / "a", a)), read_evaluation(evaluation(tmp_path / "b", b)))
    same, across = result["recalled"]
    assert (same["first"], same["second"], across["second"]) == (
        "recall_evidence",
        "recall_evidence",
        "recall_rationale",
    )
    assert same["count"] == across["count"] == 4  # the last question's passages lack the gold in the first run
    assert [same[key] for key in ("both", "only_first", "only_second", "neither")] == [0.25, 0.25, 0.5, 0.0]
    assert [across[key] for key in ("both", "only_first", "only_second", "neither")] == [0.5, 0.0, 0.25, 0.25]


def test_where_nobody_knows_of_the_passages_all_questions_count(tmp_path: Path) -> None:
    known: list[float | None] = [0.0, 1.0, None]
    a: list[Row] = [(str(n), {"recall_refinement": 1.0, "recall_passages": p}) for n, p in enumerate(known)]
    b: list[Row] = [(str(n), {"recall_refinement": 0.0}) for n in range(3)]
    result = compare(read_evaluation(evaluation(tmp_path / "a", a)), read_evaluation(evaluation(tmp_path / "b", b)))
    (row,) = result["recalled"]
    assert row["count"] == 2 and row["only_first"] == 1.0  # not the one whose passages lack the gold


@pytest.mark.parametrize(("count", "shown"), [(9, "0.00391"), (13, "0.000244"), (20, "< 0.0001")])
def test_p_values_are_shown_down_to_one_in_ten_thousand(tmp_path: Path, count: int, shown: str) -> None:
    runs = [
        read_evaluation(evaluation(tmp_path / name, [(str(n), {"em": em}) for n in range(count)]))
        for name, em in (("a", 0.0), ("b", 1.0))
    ]
    (row,) = difference_rows(compare(*runs))
    assert row[5] == shown  # better on all `count` questions: 2 / 2^count


def seeds_of(tmp_path: Path, name: str, *right: int, questions: int = 134, **figures: Any) -> list[str]:
    """Write evaluations of several seeds; each is right on its first `right` questions."""
    folders = [tmp_path / f"{name}{seed}" for seed in range(len(right))]
    for folder, count in zip(folders, right, strict=True):
        rows: list[Row] = [(str(n), {"em": float(n < count)}) for n in range(questions)]
        evaluation(folder, rows, **figures)
    return [str(folder) for folder in folders]


def test_of_several_seeds_the_seed_is_the_unit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hundreds of questions give only three values."""
    first, second = seeds_of(tmp_path, "a", 103, 133, 96), seeds_of(tmp_path, "b", 106, 134, 113, system="arena")
    words = ["compare", first[0], second[0], "--first-seeds", *first[1:], "--second-seeds", *second[1:]]
    assert cli.run([*words, "--out", str(tmp_path / "out")]) == 0
    result = json.loads((tmp_path / "out" / "compare.json").read_text())
    em = result["differences"]["em"]
    assert (em["p"], em["count"], em["test"]) == (0.25, 3, "exact sign flip test over seeds")
    half = 4.303 * 76**0.5 / 134 / 3**0.5  # for 3, 1 and 17 questions, by Student's t
    assert [em[key] for key in ("difference", "low", "high")] == pytest.approx(
        [7 / 134, 7 / 134 - half, 7 / 134 + half]
    )
    assert result["seeds"] == 3 and result["second"]["folders"] == second
    over_questions = [pair["differences"]["em"]["p"] for pair in result["pairs"]]
    assert over_questions == pytest.approx([0.25, 1.0, 2 / 2**17])  # each seed by itself, over 3, 1 and 17 questions
    note = "With 3 seeds no p is below 0.25."
    assert note in (tmp_path / "out" / "compare.md").read_text() and note in " ".join(capsys.readouterr().out.split())
    assert "| Seeds | Test |" in (tmp_path / "out" / "compare.md").read_text()
    # A run that does not depend on the seed is compared with every seed, on either side.
    assert cli.run(["compare", first[0], second[0], "--second-seeds", *second[1:], "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)["differences"]["em"]
    assert alone["first"] == pytest.approx(103 / 134) and alone["difference"] == pytest.approx((3 + 31 + 10) / 3 / 134)


def test_shares_of_recalled_golds_are_means_over_seeds(tmp_path: Path) -> None:
    def run(name: str, recalled: str) -> Evaluation:
        rows: list[Row] = [(str(n), {"recall_evidence": float(held)}) for n, held in enumerate(recalled)]
        return read_evaluation(evaluation(tmp_path / name, rows))

    pairs = [run("a0", "11"), run("a1", "00")], [run("b0", "10"), run("b1", "10")]
    (row,) = compare_over_seeds(*pairs)["recalled"]
    assert [row[key] for key in ("both", "only_first", "only_second", "neither")] == [0.25, 0.25, 0.25, 0.25]
    assert row["count"] == 4


def test_seeds_that_make_no_pairs_end_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = seeds_of(tmp_path, "a", 1, 2, 3, questions=4), seeds_of(tmp_path, "b", 1, 2, questions=4)
    for more, others, problem in (
        (first[1:], second[1:], "3 evaluations of the first against 2 of the second; name one per seed of each"),
        ([first[1], first[1]], [second[1], first[2]], "a1 is named twice; name the evaluation of another seed"),
    ):
        words = ["compare", first[0], second[0], "--first-seeds", *more, "--second-seeds", *others]
        assert cli.run(words) == 2
        error = capsys.readouterr().err
        assert problem in error and error.count("\n") == 1


def test_judges_are_named_and_unequal_ones_called_out(tmp_path: Path) -> None:
    rows: list[Row] = [("x", {"entailment": 0.5, "verdict": 1.0})]
    a = evaluation(tmp_path / "a", rows, entailment_judge="overlap (stand-in)", verdict_judge="big")
    b = evaluation(tmp_path / "b", rows, entailment_judge="a classifier", verdict_judge="big")
    result = compare(read_evaluation(a), read_evaluation(b))
    judged = (
        "Entailment judged by overlap (stand-in) and a classifier: their numbers cannot be compared, and are left out."
    )
    assert judged in result["notes"] and set(result["differences"]) == {"verdict"}
    assert "Answers judged by big." in result["notes"]


def test_what_cannot_be_compared_ends_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = evaluation(tmp_path / "good", [("x", {"em": 1.0})])
    apart = evaluation(tmp_path / "apart", [("y", {"em": 1.0})])
    other, old, part = tmp_path / "other", tmp_path / "old", tmp_path / "part"
    for folder, record in (
        (other, {"question": "Who was x?", "parts": {}, "measures": {"em": 1.0}}),
        (old, {"question": "Who is x?", "parts": {}}),
        (part, {"question": "Who is x?", "parts": {"format": "x"}, "measures": {"em": 1.0}}),
    ):
        folder.mkdir()
        write_object(folder / "metrics.json", {})
        write_records(folder / "trajectories.jsonl", [{"id": "x", **record}])
    strange = [evaluation(tmp_path / f"strange{n}", [("x", {"em": bad})]) for n, bad in enumerate(([7], "x", 10**400))]
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    (unfinished / "settings.json").write_text("{}")
    for folder, problem in (
        (apart, "no question is in both"),
        (other, "question x of"),
        (old, "line 1 has no measures"),
        *((each, "line 1: measures.em: expected a number or null") for each in strange),
        (part, "line 1: parts.format: expected a number or null"),
        (unfinished, "holds an unfinished evaluation"),
        (tmp_path / "nowhere", "holds no evaluation"),
    ):
        assert cli.run(["compare", str(good), str(folder), "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert problem in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
