"""The search loops, driven by hand: an episode's requests after each kind of turn, and when it ends."""

from collections.abc import Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from episode_cases import drive as play
from episode_cases import kinds

from thresher.common.errors import UserError
from thresher.engine.episode import (
    Generate,
    Prompt,
    Retrieved,
    Search,
    System,
    Turn,
    pair_tags,
    read_template,
)
from thresher.engine.systems import load_system
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question
from thresher.retrieval.retriever import Hit
from thresher.rewards.reward import RewardInput, Source, TextSegment

QUESTION = Question("q", "Who mapped Glass Bay?", ("Anna Bell",))
HITS = [Hit(4, Passage("p4", "Glass Bay", "Anna Bell mapped it."), 0.5)]
SYSTEMS = ("search_r1", "eval_rar", "evinote", "evinote_code")
SEARCH, ANSWER = Generate(("</search>", "</answer>")), "<answer>Anna Bell</answer>"


def drive(system: System, texts: Sequence[str], max_turns: int = 4) -> tuple[list[Any], str | None]:
    return play(system, QUESTION, texts, repeat(HITS), max_turns=max_turns, template="T {question}")


@pytest.fixture(params=SYSTEMS)
def system(request: pytest.FixtureRequest) -> System:
    return load_system(request.param, {})


def test_search_read_answer(system: System) -> None:
    requests, reason = drive(system, ["<think>Hm.</think><search> Glass Bay </search>", ANSWER])
    assert requests[:3] == [Prompt("T {question}", QUESTION.question), SEARCH, Search("Glass Bay")]
    shown = requests[3]
    assert isinstance(shown, Retrieved) and shown.hits is HITS
    assert (shown.before, shown.after) == ("\n\n<information>", "</information>\n\n")
    assert requests[4:] == [SEARCH] and reason == "answered"
    requests, reason = drive(system, [ANSWER])
    assert kinds(requests) == ["Prompt", "Generate"] and reason == "answered"


@pytest.mark.parametrize(
    "text",
    [
        "I do not know.<|endoftext|>",
        "<search> </search>",
        "<answer>\n</answer>",
        "Glass Bay</search>",  # never opened
        "Anna Bell</answer>",
        "<answer>Glass Bay</search>",
        "<search>Anna Bell</answer>",
        "<Search>Glass Bay</search>",
        "",
    ],
)
def test_a_turn_without_an_action_gets_feedback_and_counts(system: System, text: str) -> None:
    requests, reason = drive(system, [text, ANSWER])
    assert kinds(requests) == ["Prompt", "Generate", "Feedback", "Generate"] and reason == "answered"
    line = requests[2].text
    assert "no valid action" in line and not any(tag in line for tag in system.tags)
    assert line.startswith("\n") and line.endswith("\n")
    requests, reason = drive(system, [text] * 3, max_turns=3)
    assert kinds(requests)[1:] == ["Generate", "Feedback", "Generate", "Feedback", "Generate"] and reason == "turns"


def test_turns_are_counted_whatever_they_hold(system: System) -> None:
    """The last of N turns may only answer: a search in it finds nothing, because no turn could read the result."""
    search = "<search>Glass Bay</search>"
    requests, reason = drive(system, [search, "", search, search], max_turns=4)
    assert kinds(requests)[1:] == [
        "Generate", "Search", "Retrieved", "Generate", "Feedback", "Generate", "Search", "Retrieved", "Generate"
    ]  # fmt: skip
    assert reason == "turns"
    assert drive(system, [search, search, ANSWER], max_turns=3)[1] == "answered"
    assert kinds(drive(system, [search], max_turns=1)[0]) == ["Prompt", "Generate"]
    assert drive(system, [search, search], max_turns=4)[1] is None, "it ended too early"


def test_autorefine_reads_between_tags_of_its_own_and_searches_an_index() -> None:
    system = load_system("autorefine", {})
    requests, reason = drive(system, ["<search>bay</search>", "<refine>x</refine><search>who</search>", "", ANSWER], 6)
    assert kinds(requests)[1:] == [*["Generate", "Search", "Retrieved"] * 2, "Generate", "Feedback", "Generate"]
    assert (requests[3].before, requests[3].after) == ("\n\n<documents>", "</documents>\n\n")
    assert reason == "answered" and system.needs_index and "<information>" not in system.tags
    assert all(load_system(name, {}).needs_index for name in SYSTEMS) and not load_system("r1", {}).needs_index
    preset = system.preset
    assert preset["rollout"]["max_turns"] == 6 and preset["rollout"]["questions_per_step"] == 256
    refined = [TextSegment(Source.POLICY, b"<search>bay</search><refine>Anna Bell</refine>")]
    wrong = RewardInput(pieces=[*refined, TextSegment(Source.POLICY, b"<answer>Bo</answer>")], golds=("Anna Bell",))
    assert system.reward(wrong).reward == 0.1
    assert load_system("autorefine", {"refinement_reward": False}).reward(wrong).reward == 0


def test_an_evaluation_of_its_own_is_none_of_the_turns_and_may_answer() -> None:
    system = load_system("eval_rar", {"separate_evaluation": True})
    search, evaluation = "<search>Glass Bay</search>", Generate(("</evaluate>", "</answer>"))
    requests, reason = drive(system, [search, "<evaluate>It says who.</evaluate>", ANSWER], max_turns=2)
    assert requests[4:] == [evaluation, SEARCH] and reason == "answered"
    requests, reason = drive(system, [search, "<evaluate>It says who." + ANSWER], max_turns=2)
    assert requests[4:] == [evaluation] and reason == "answered"


def test_search_r1_without_a_last_turn_to_answer() -> None:
    system = load_system("search_r1", {"answer_after_searches": False})
    search = "<search>Glass Bay</search>"
    requests, reason = drive(system, [search, search], max_turns=3)
    assert kinds(requests)[1:] == ["Generate", "Search", "Retrieved"] * 2 and reason == "turns"
    assert drive(system, [search, ANSWER], max_turns=3)[1] == "answered"
    assert kinds(drive(system, [], max_turns=1)[0]) == ["Prompt"]


def test_the_first_block_is_the_action() -> None:
    """A turn ends at the first closing tag, but its token may go on, and a turn may have opened several tags."""
    assert Turn(b"<search>a</search><search>b</search>", "</search>").inside("search") == "a"
    assert Turn(b"<search>x <search>a</search>", "</search>").inside("search") == "a"
    assert Turn(b"<search>a</search", None).inside("search") is None
    assert Turn(b"<search>a</search></", "</search>").inside("search") == "a"
    assert Turn(b"<search>K\xc3</search>", "</search>").inside("search") == "K\ufffd"
    assert Turn(b"", None).inside("answer") is None
    assert Turn(b"x</answer>", "</answer>").stopped_at("</answer>")
    assert not Turn(b"x</answer>", "</answer>").stopped_at("</search>")


@pytest.mark.parametrize(
    ("variant", "note", "marks", "judged"),
    [
        ("Base", None, False, False),
        ("NS", "summary", False, False),
        ("NE", "evidence", False, False),
        ("FS", "summary", False, False),
        ("FS+SR", "summary", False, False),
        ("FS+EQR", "summary", False, True),
        ("SEN", "summary", True, False),
        ("SEN+EQR", "summary", True, True),
    ],
)
def test_evinotes_prompt_tags_and_claims_go_with_the_variant(
    variant: str, note: str | None, marks: bool, judged: bool
) -> None:
    system = load_system("evinote", {"variant": variant})
    assert system.tags == pair_tags("think", "search", "information", *([note] if note else []), "answer")
    for tag in ("summary", "evidence"):
        assert (f"<{tag}>" in system.template) == (tag == note)
    assert ("*like this*" in system.template and "-like this-" in system.template) == marks
    assert (system.claims is not None) == judged
    noted = pieces("<search>a</search>", "<information>p</information>", "<summary>*A* -b-</summary>" + ANSWER)
    scored = system.reward(RewardInput(pieces=noted, golds=QUESTION.golds, entailment=0.5))
    assert scored.reward == (1.5 if judged else 1)


def test_evinotes_claims_are_about_its_last_note() -> None:
    system = load_system("evinote", {})
    first = ("<search>a</search>", "p", "<summary>One.</summary><search>b</search>")
    noted = pieces(*first, "p", "<summary>Two.</summary>")
    attempt = RewardInput(pieces=noted, golds=("Anna Bell", "A. Bell"), question=QUESTION.question)
    assert system.claims is not None
    assert list(system.claims(attempt)) == [
        ("Two.", "Anna Bell is the answer to 'Who mapped Glass Bay?'"),
        ("Two.", "A. Bell is the answer to 'Who mapped Glass Bay?'"),
    ]
    either = load_system("evinote", {"variant": "SEN", "marks": "either"}).reward
    one = pieces("<search>a</search>", "p", "<summary>*A*</summary><answer>Bo</answer>")
    assert either(RewardInput(pieces=one, golds=("x",))).reward == 0.1
    assert load_system("evinote", {"variant": "SEN"}).reward(RewardInput(pieces=one, golds=("x",))).reward == 0


def pieces(*texts: str) -> list[TextSegment]:
    """Return a prompt with an example, then by turns policy text and passages that hold the answer."""
    sources = [Source.POLICY if number % 2 == 0 else Source.RETRIEVED for number in range(len(texts))]
    written = [TextSegment(source, text.encode()) for source, text in zip(sources, texts, strict=True)]
    return [TextSegment(Source.PROMPT, b"<answer> Anna Bell </answer>"), *written]


def test_rewards_are_the_papers() -> None:
    golds = QUESTION.golds
    passage = "<information><answer>Anna Bell</answer></information>"
    right = pieces("<search>Glass Bay</search>", passage, ANSWER)
    cited = pieces("<search>a</search>", passage, "<evaluate>Anna Bell did.</evaluate><answer>Bo</answer>")
    early = pieces("<evaluate>Anna Bell?</evaluate><search>a</search>", passage, "<answer>Bo</answer>")
    silent = pieces("<search>a</search>", passage, "<evaluate>Anna Bell did.</evaluate>")
    part = pieces("<evaluate>Annabelle</evaluate><answer>Bo</answer>")

    def rewards(name: str, **options: bool) -> list[float]:
        reward = load_system(name, options).reward
        return [reward(RewardInput(pieces=p, golds=golds)).reward for p in (right, cited, early, silent, part)]

    assert rewards("search_r1") == [1, 0, 0, 0, 0]
    assert rewards("eval_rar") == [1, 0.1, 0.1, 0.1, 0]
    assert rewards("eval_rar", evaluation_reward=False) == [1, 0, 0, 0, 0]
    assert rewards("eval_rar", count_before_search=False) == [1, 0.1, 0, 0.1, 0]
    assert rewards("eval_rar", require_answer=True) == [1, 0.1, 0.1, 0, 0]
    whole = load_system("eval_rar", {"substring": False}).reward
    anna = RewardInput(pieces=part, golds=("Anna",))
    assert whole(anna).reward == 0 and load_system("eval_rar", {}).reward(anna).reward == 0.1


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("search-r1", {}, "system 'search-r1' is unknown; did you mean search_r1?"),
        ("evinote-code", {}, "system 'evinote-code' is unknown; did you mean evinote_code?"),
        ("os", {}, "system 'os' is unknown; choose one of arena, .*, or give a file"),
        ("evinote", {"variant": "SEN + EQR"}, r'\[system\.options\].*variant: expected "Base" or'),
        ("evinote", {"marks": "none"}, r"\[system\.options\].*marks"),
        ("arena", {"accuracy": "bleu"}, r"\[system\.options\].*accuracy"),
        ("arena", {"max_indices": 0}, r"max_indices: expected an integer >= 1, got 0"),
        ("eviomni", {"tau": 0}, r"tau: expected a number > 0, got 0"),
        ("eviomni", {"omega": 2}, r"omega"),
        (
            "lear",
            dict.fromkeys(("rationale", "evidence", "full"), False),
            "expected one of rationale, evidence and full",
        ),
        ("eval_rar", {"evaluation_rewards": True}, r"\[system\.options\].*evaluation_rewards"),
        ("eval_rar", {"substring": "yes"}, r"\[system\.options\].*substring"),
        ("search_r1", {"evaluation_reward": True}, r"\[system\.options\].*evaluation_reward"),
        ("search_r1", {"answer_after_searches": 1}, r"\[system\.options\].*answer_after_searches"),
    ],
)
def test_unknown_names_and_switches_are_refused(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_system(name, options)


def test_templates_from_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("Frage: {question}\nÄh", encoding="utf-8")
    assert read_template(path) == "Frage: {question}\nÄh"
    for content, said in [
        (b"no place", "exactly once, found 0"),
        (b"{question} {passages}", "must not contain {passages}.*found 1"),
        (b"{question} {question}", "exactly once, found 2"),
        (b"\xff{question}", "not valid UTF-8 at byte 0"),
    ]:
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"mine.txt: .*{said}"):
            read_template(path)
    path.write_bytes(b"{question}")
    with pytest.raises(UserError, match=r"needs {passages} exactly once, found 0"):
        read_template(path, passages=True)
    with pytest.raises(UserError, match=r"absent\.txt: no such file"):
        read_template(tmp_path / "absent.txt")
