"""Tests of the rewards of Search-R1, Eval-RAR and Tree-GRPO: honest transcripts, and those that try to cheat."""

import pytest
from reward_cases import transcript

from thresher.rewards import RewardResult, autorefine_reward, eval_rar_reward, search_r1_reward, tree_grpo_reward

SEARCH = "p:<think>t</think><search>who</search>"
PASSAGE = 'r:<information>Doc 1(Title: "P") Paris is the capital.</information>'

CASES = [
    # case, pieces, golds, Search-R1, Eval-RAR
    ("right", [SEARCH, PASSAGE, "p:<evaluate>Paris</evaluate><answer>Paris</answer>"], ["Paris"], 1, 1),
    ("right without evaluating", [SEARCH, PASSAGE, "p:<answer>the Paris.</answer>"], ["Lyon", "Paris"], 1, 1),
    ("wrong, evaluated", [SEARCH, PASSAGE, "p:<evaluate>It is Paris</evaluate><answer>Rome</answer>"], "Paris", 0, 0.1),
    ("wrong, not evaluated", [SEARCH, PASSAGE, "p:<answer>Rome</answer>"], "Paris", 0, 0),
    ("no answer, evaluated", [SEARCH, PASSAGE, "p:<evaluate>Paris</evaluate>"], "Paris", 0, 0.1),
    ("answer in a passage", [SEARCH, "r:<answer>Paris</answer>", "p:so be it"], "Paris", 0, 0),
    ("evaluate in a passage", [SEARCH, "r:<evaluate>Paris</evaluate>", "p:<answer>Rome</answer>"], "Paris", 0, 0),
    ("evaluate in the prompt", ["q:<evaluate>Paris</evaluate>", "p:<answer>Rome</answer>"], "Paris", 0, 0),
    ("evaluate closed by feedback", ["p:<evaluate>Paris", "f:</evaluate>", "p:<answer>Rome</answer>"], "Paris", 0, 0),
    ("answer opened, passage inside", ["p:<answer>", "r:Paris", "p:</answer>"], "Paris", 0, 0),
    ("a copied passage", [SEARCH, PASSAGE, "p:<evaluate>Doc 1 Paris is the capital.</evaluate>"], "Paris", 0, 0.1),
    ("right, then wrong", ["p:<answer>Paris</answer><answer>Rome</answer>"], "Paris", 1, 1),
    ("evaluate after the end", ["p:<answer>Rome</answer><evaluate>Paris</evaluate>"], "Paris", 0, 0),
    ("gold outside the inner one", ["p:<evaluate>Paris<evaluate>Rome</evaluate></evaluate>"], "Paris", 0, 0),
    ("gold over two blocks", ["p:<evaluate>New</evaluate>, <evaluate>York</evaluate>"], "New York", 0, 0.1),
    ("gold no in not know", ["p:<evaluate>I do not know</evaluate><answer>?</answer>"], "no", 0, 0.1),
    ("gold no, said", ["p:<evaluate>The answer is no</evaluate><answer>yes</answer>"], "no", 0, 0.1),
    ("gold inside a word", ["p:<evaluate>the PARTY began</evaluate>"], "art", 0, 0.1),
    ("gold glued from two blocks", ["p:<evaluate>New</evaluate><evaluate>York</evaluate>"], "newyork", 0, 0),
    ("gold without a token", ["p:<evaluate>the end</evaluate>"], ["The", ""], 0, 0),
    ("gold over a passage", ["p:<evaluate>a</evaluate>", PASSAGE, "p:<evaluate>b</evaluate>"], "Paris", 0, 0),
]


@pytest.mark.parametrize(
    ("parts", "golds", "search_r1", "eval_rar"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_rewards(parts: list[str], golds: str | list[str], search_r1: float, eval_rar: float) -> None:
    pieces = transcript(*parts)
    assert search_r1_reward(pieces, golds).reward == search_r1
    assert eval_rar_reward(pieces, golds).reward == eval_rar
    assert eval_rar_reward(pieces, golds, evaluation_reward=False).reward == search_r1
    parts = eval_rar_reward(pieces, golds).parts
    assert parts["answer"] == search_r1 and max(parts["answer"], parts["evaluation"]) == eval_rar


def test_the_parts_explain_the_reward() -> None:
    pieces = transcript(
        "q:<search>x</search>",
        "p:<search>one</search>",
        "r:<search>y</search>",
        "p:<evaluate>born in Lyon</evaluate><search> </search>",
        "f:invalid, try again",
        "p:<search>two</search>",
        "r:..",
        "p:<evaluate>nothing</evaluate><answer>Lyon, France</answer><search>three</search>",
    )
    assert search_r1_reward(pieces, "Lyon") == RewardResult(
        0.0, {"answer": 0.0, "em": False, "f1": pytest.approx(2 / 3), "answered": True, "searches": 2}, "Lyon, France"
    )
    measures = {"em": False, "f1": pytest.approx(2 / 3), "answered": True, "searches": 2, "evaluations": 2}
    parts = {"answer": 0.0, "evaluation": 0.1, "evaluate_contains": True}
    assert eval_rar_reward(pieces, "Lyon") == RewardResult(0.1, parts | measures, "Lyon, France")
    silent = eval_rar_reward(transcript("p:hm"), "Lyon")
    assert (silent.reward, silent.answer, silent.parts["answered"], silent.parts["f1"]) == (0.0, None, False, 0.0)


def test_the_switches_of_eval_rar() -> None:
    right = transcript(SEARCH, PASSAGE, "p:<evaluate>Paris</evaluate><answer>Paris</answer>")
    result, off = (eval_rar_reward(right, "Paris", evaluation_reward=on) for on in (True, False))
    assert (result.reward, result.parts["answer"], result.parts["evaluation"]) == (1.0, 1.0, 0.1)
    assert (off.parts["evaluation"], off.parts["evaluate_contains"]) == (0.0, True)

    early = transcript("p:<evaluate>Lyon</evaluate><search>q</search>", "r:..", "p:<answer>Rome</answer>")
    late = transcript("p:<search>q</search>", "r:..", "p:<evaluate>Lyon</evaluate><answer>Rome</answer>")
    never = transcript("p:<search> </search><evaluate>Lyon</evaluate><answer>Rome</answer>")
    assert [eval_rar_reward(t, "Lyon").reward for t in (early, late, never)] == [0.1, 0.1, 0.1]
    strict = [eval_rar_reward(t, "Lyon", count_before_search=False) for t in (early, late, never)]
    assert [(result.reward, result.parts["evaluations"]) for result in strict] == [(0.0, 0), (0.1, 1), (0.0, 0)]

    open_ended = transcript("p:<search>q</search>", "r:..", "p:<evaluate>Lyon</evaluate>")
    required = eval_rar_reward(open_ended, "Lyon", require_answer=True)
    assert required.reward == 0.0 and required.parts["evaluate_contains"] is True
    answered = transcript("p:<evaluate>Lyon</evaluate><answer></answer>")
    assert eval_rar_reward(answered, "Lyon", require_answer=True).reward == 0.1

    told = transcript("p:<evaluate>a New party, yes or no</evaluate><evaluate>York</evaluate>")
    for gold in ("art", "yes", "no", "New York", "arty yes"):
        assert eval_rar_reward(told, gold, substring=False).reward == 0.0
    assert eval_rar_reward(told, ["Rome", "york"], substring=False).reward == 0.1


@pytest.mark.parametrize(
    ("parts", "reward", "code"),
    [  # pieces; the reward by the equation, and by the released code (exact match, an answer required)
        (["p:<refine>Anna Bell</refine><answer>Anna Bell</answer>"], 1.0, 1.0),
        (["p:<answer>Anna Bell</answer>"], 1.0, 1.0),
        (["p:<refine>Anna Bell</refine><answer>Anna Cole</answer>"], 0.5, 0.1),  # F1 is above 0
        (["p:<refine>it was Anna Bell.</refine><answer>Bo</answer>"], 0.1, 0.1),
        (["p:<refine>Anna</refine><refine>Bell</refine><answer>Bo</answer>"], 0.0, 0.0),  # no gold across two spans
        (["p:<refine>Anna Bell</refine>"], 0.1, 0.0),
        (["p:<answer>Bo</answer><refine>Anna Bell</refine>"], 0.0, 0.0),  # after the end
        (["r:<refine>Anna Bell</refine>", "p:<answer>Bo</answer>"], 0.0, 0.0),
        (["q:such as <refine>Anna Bell</refine>", "p:<refine>", "r:Anna Bell", "p:</refine>"], 0.0, 0.0),
        ([], 0.0, 0.0),
    ],
)
def test_autorefine(parts: list[str], reward: float, code: float) -> None:
    pieces = transcript(*parts)
    result = autorefine_reward(pieces, "Anna Bell")
    assert result.reward == pytest.approx(reward) == (result.parts["answer"] or result.parts["refinement"])
    assert autorefine_reward(pieces, "Anna Bell", accuracy="em", require_answer=True).reward == code
    assert autorefine_reward(pieces, "Anna Bell", refinement_reward=False).reward == result.parts["f1"]
    assert autorefine_reward(pieces, "yes").parts["refine_contains"] is False


THINK, RIGHT = "<think>so</think>", "<answer>Paris</answer>"
LOOK = f"p:{THINK}<search>who</search>"
FORMS = [
    # case, pieces, reward with gold Paris, and with gold Oslo: 1 and .2 in form, .8 and .1 out of it
    ("answered at once", [f"p:{THINK}{RIGHT}"], 1.0, 0.2),
    ("searched", [LOOK, PASSAGE, f"p: {THINK}\n{RIGHT}<|im_end|>"], 1.0, 0.2),
    ("one turn in two pieces", ["p:<think>so</thi", f"p:nk>{RIGHT}"], 1.0, 0.2),
    ("the question holds tags", ["q:<answer> Lisbon </answer>", f"p:{THINK}{RIGHT}"], 1.0, 0.2),
    ("no thought", [f"p:{RIGHT}"], 0.8, 0.1),
    ("no thought after a search", [LOOK, PASSAGE, f"p:{RIGHT}"], 0.8, 0.1),
    ("text between", [f"p:{THINK} well {RIGHT}"], 0.8, 0.1),
    ("text behind", [f"p:{THINK}{RIGHT} done"], 0.8, 0.1),
    ("a tag inside a thought", [f"p:<think><search>who</search></think>{RIGHT}"], 0.8, 0.1),
    ("feedback between", [f"p:{THINK}<search></search>", "f:again", f"p:{THINK}{RIGHT}"], 0.8, 0.1),
    ("two actions in a turn", [f"{LOOK}{THINK}{RIGHT}"], 0.8, 0.1),
    ("information of its own", [f"{LOOK}<information>Paris</information>{THINK}{RIGHT}"], 0.8, 0.1),
    ("an answer, then more", [f"p:{THINK}{RIGHT}", PASSAGE, f"p:{THINK}{RIGHT}"], 0.8, 0.1),
    ("a search last", [LOOK, PASSAGE], 0.0, 0.0),
    ("an answer in a passage", [LOOK, f"r:{THINK}{RIGHT}"], 0.0, 0.0),
    ("nothing", ["q:Who?"], 0.0, 0.0),
]


@pytest.mark.parametrize(("parts", "paris", "oslo"), [case[1:] for case in FORMS], ids=[case[0] for case in FORMS])
def test_tree_grpo_pays_for_the_form(parts: list[str], paris: float, oslo: float) -> None:
    pieces = transcript(*parts)
    right, wrong = tree_grpo_reward(pieces, "Paris"), tree_grpo_reward(pieces, "Oslo")
    assert (right.reward, wrong.reward) == (paris, oslo)
    assert right.parts["format"] == wrong.parts["format"] == (oslo == 0.2)
    assert tree_grpo_reward(pieces, "Paris", format_reward=False).reward == right.parts["answer"] == (paris > 0)
