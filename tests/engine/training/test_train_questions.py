"""What a step of training is given: its questions and its seeds."""

from thresher.engine.training.step import questions_of_step, seed_of
from thresher.retrieval.questions import Question


def test_questions_of_a_step_come_once_in_every_pass() -> None:
    questions = [Question(str(number), "?", ("a",)) for number in range(10)]
    asked = [q.id for step in range(1, 11) for q in questions_of_step(questions, 4, 7, step)]
    passes = [asked[at : at + 10] for at in range(0, 40, 10)]
    assert all(sorted(part) == sorted(q.id for q in questions) for part in passes)
    assert len({tuple(part) for part in passes}) == 4  # each in an order of its own
    again = [q.id for q in questions_of_step(questions, 4, 7, 3)]
    assert again == asked[8:12] != [q.id for q in questions_of_step(questions, 4, 8, 3)]
    assert [q.id for q in questions_of_step(questions[:2], 5, 0, 1)].count("0") in (2, 3)


def test_seeds_are_the_same_on_every_machine() -> None:
    assert seed_of(0, 1, 2, 3) == 3252311618909706447
    assert len({seed_of(*parts) for parts in ((1, 2), (2, 1), (12,), ("1", 2), (1, 2, 0))}) == 5
    assert all(0 <= seed_of(number) < 2**63 for number in range(100))
