"""The invented world's judge: labels agree with the facts, and the trained model loads like any classifier."""

import random
from pathlib import Path

import pytest

from thresher.engine.config.sections import JudgeSection
from thresher.engine.scoring.judges import LexicalJudge, load_judge
from thresher.engine.world import judge as note_judge
from thresher.engine.world.facts import Fact, Size, invent
from thresher.engine.world.judge import LABELS, invent_pairs, label_of, make_judge

SMALL = Size(people=24, places=16, works=20, pieces=14, warmup_worlds=1)
AUTHOR = Fact("Amber Lattice", "author", "Bel Dorin")
SPOUSE = Fact("Bel Dorin", "spouse", "Ral Quirein")


@pytest.mark.parametrize(
    ("path", "note", "label"),
    [
        ([AUTHOR], "* Amber Lattice has author Bel Dorin.\n- the rest", "entailment"),
        ([AUTHOR], "Amber Lattice has author Ral Quirein.", "contradiction"),
        ([AUTHOR], "Amber Lattice has owner Bel Dorin.", "neutral"),
        ([AUTHOR], "Ral Quirein has author Bel Dorin.", "neutral"),
        ([AUTHOR], "What is the author of Amber Lattice? Bel Dorin", "neutral"),
        ([AUTHOR], "", "neutral"),
        ([AUTHOR, SPOUSE], "* Bel Dorin has spouse Ral Quirein.", "entailment"),
        ([AUTHOR, SPOUSE], "* Amber Lattice has author Bel Dorin.", "neutral"),
        ([AUTHOR, SPOUSE], "* Ral Quirein has spouse Bel Dorin.", "neutral"),
    ],
)
def test_labels(path: list[Fact], note: str, label: str) -> None:
    assert label_of(note, path) == label


def test_pairs_are_of_all_kinds_and_fool_whoever_counts_words() -> None:
    pairs = invent_pairs(invent(SMALL, 3).train, 600, random.Random(1))
    assert pairs == invent_pairs(invent(SMALL, 3).train, 600, random.Random(1))
    counts = [sum(label == place for *_, label in pairs) for place in range(3)]
    assert 200 <= counts[LABELS.index("entailment")] <= 300 and min(counts) > 10
    fooled = [
        score > 0.2
        for score, (*_, label) in zip(LexicalJudge().probabilities([pair[:2] for pair in pairs]), pairs, strict=True)
        if LABELS[label] != "entailment"
    ]
    assert sum(fooled) > len(fooled) / 10


def test_a_judge_is_a_classifier_and_a_function_of_its_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(note_judge, "HELD_OUT", 50)
    figures = [make_judge(tmp_path / name, 3, 4, SMALL) for name in ("a", "b")]
    assert figures[0]["loss"] == figures[1]["loss"] and 0 <= figures[0]["accuracy"] <= figures[0]["of entailment"]
    files = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in "ab"}
    assert files["a"] == files["b"]
    judge = load_judge(JudgeSection(entailment=str(tmp_path / "a")))
    pairs = [("* Amber Lattice has author Bel Dorin.", "Bel Dorin is the answer to 'Who?'"), ("Zürich!", "x")]
    assert all(0 < probability < 1 for probability in judge.probabilities(pairs))
    assert judge.name == "entailment by a"
