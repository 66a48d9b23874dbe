"""`thresher score`: anyone's transcripts, scored by a system's own reward, or refused by file and line."""

import json
from pathlib import Path
from typing import Any

import pytest

from thresher.cli import main as cli
from thresher.common.errors import UserError
from thresher.engine.protocol.trajectory import Segment, Trajectory
from thresher.engine.scoring.score import Judges, score
from thresher.engine.scoring.transcripts import score_file
from thresher.engine.systems import NAMES, load_system
from thresher.policy.tokenizer import Tokenizer
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question
from thresher.rewards.reward import Source, TextSegment, hash_uniform

SYSTEMS = ("eval_rar", "search_r1")


def segment(source: str, text: str) -> dict[str, str]:
    return {"source": source, "text": text}


def transcript(*segments: dict[str, str], golds: list[str] | None = None, id: Any = "a", **more: Any) -> dict[str, Any]:
    golds = ["Paris"] if golds is None else golds
    return {"id": id, "question": "Where?", "golden_answers": golds, "segments": list(segments)} | more


RIGHT = segment("policy", "<think>x</think><answer> Paris </answer>")
CITED = segment("policy", "<evaluate>It is in Paris.</evaluate><answer>Rome</answer>")
FAKED = [segment(source, "<answer>Paris</answer>") for source in ("prompt", "retrieved", "feedback")]


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def score_lines(
    tmp_path: Path, system: str, *records: Any, options: dict[str, Any] | None = None, tokenizer: Path | None = None
) -> list[dict[str, Any]]:
    source, out = write(tmp_path / "in.jsonl", *records), tmp_path / "out.jsonl"
    figures = score_file(system, options or {}, source, out, tokenizer)
    scored = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert figures == {
        "transcripts": len(records),
        "reward": pytest.approx(sum(entry["reward"] for entry in scored) / len(scored)),
    }
    return scored


@pytest.mark.parametrize(
    ("segments", "eval_rar", "search_r1", "answer"),
    [
        ([RIGHT], 1.0, 1.0, "Paris"),
        ([CITED], 0.1, 0.0, "Rome"),
        ([segment("policy", "<evaluate>Paris</evaluate>")], 0.1, 0.0, None),
        ([segment("policy", "<answer>Rome</answer>")], 0.0, 0.0, "Rome"),
        ([segment("policy", "Paris")], 0.0, 0.0, None),
        ([*FAKED, segment("policy", "Rome")], 0.0, 0.0, None),
        ([*FAKED, CITED], 0.1, 0.0, "Rome"),
        # Adjacent pieces of the policy are one text; a passage between them cuts a tag in two.
        ([segment("policy", "<ans"), segment("policy", "wer>the paris</answer>")], 1.0, 1.0, "the paris"),
        (
            [segment("policy", "<ans"), segment("retrieved", "-"), segment("policy", "wer>Paris</answer>")],
            0.0,
            0.0,
            None,
        ),
        ([], 0.0, 0.0, None),
    ],
)
def test_both_systems(
    tmp_path: Path, segments: list[dict[str, str]], eval_rar: float, search_r1: float, answer: str | None
) -> None:
    for system, expected in zip(SYSTEMS, (eval_rar, search_r1), strict=True):
        (entry,) = score_lines(tmp_path, system, transcript(*segments))
        assert list(entry) == ["id", "reward", "parts", "answer"]
        assert entry["reward"] == expected
        assert entry["answer"] == answer
        assert entry["parts"]["em"] == (expected == 1) and entry["parts"]["answered"] == (answer is not None)


def test_parts_of_each_system(tmp_path: Path) -> None:
    common = {"answer": 0.0, "em": False, "f1": 0.0, "answered": True, "searches": 1}
    searched = transcript(segment("policy", "<search>q</search>"), FAKED[1], CITED)
    (entry,) = score_lines(tmp_path, "search_r1", searched)
    assert entry["parts"] == common
    (entry,) = score_lines(tmp_path, "eval_rar", searched)
    assert entry["parts"] == common | {"evaluation": 0.1, "evaluations": 1, "evaluate_contains": True}


def test_order_and_ids_are_kept_and_golds_are_alternatives(tmp_path: Path) -> None:
    records = [
        transcript(RIGHT, golds=golds, id=id) for id, golds in (("b", ["Rome"]), (7, ["Rome", "PARIS."]), ("é", []))
    ]
    scored = score_lines(tmp_path, "search_r1", *records)
    assert [(entry["id"], entry["reward"]) for entry in scored] == [("b", 0.0), (7, 1.0), ("é", 0.0)]


def test_the_trajectories_of_a_run_can_be_scored(tmp_path: Path) -> None:
    """What the run folder holds has more keys, and ids beside every text."""
    more = {"group": 0, "sample": 1, "reason": "answered", "searches": [], "reward": 1.0, "advantage": 0.5}
    (entry,) = score_lines(tmp_path, "eval_rar", transcript(RIGHT | {"ids": [1, 2]}, **more))
    assert entry["reward"] == 1.0


def test_text_that_is_no_unicode_is_rated_all_the_same(tmp_path: Path) -> None:
    (entry,) = score_lines(tmp_path, "search_r1", transcript(segment("policy", "\ud800<answer>Paris</answer>\udfff")))
    assert entry["reward"] == 1.0


@pytest.mark.parametrize(
    ("options", "expected"), [({}, 0.1), ({"evaluation_reward": False}, 0.0), ({"count_before_search": False}, 0.0)]
)
def test_switches_of_the_system(tmp_path: Path, options: dict[str, Any], expected: float) -> None:
    assert score_lines(tmp_path, "eval_rar", transcript(CITED), options=options)[0]["reward"] == expected
    flags = [part for key, value in options.items() for part in ("--set", f"{key}={str(value).lower()}")]
    out = tmp_path / "again.jsonl"
    command = ["score", "--system", "eval_rar", "--transcripts", str(tmp_path / "in.jsonl"), "--out", str(out), *flags]
    assert cli.run(command) == 0
    assert out.read_bytes() == (tmp_path / "out.jsonl").read_bytes()


# --- The systems that look at more than the segments

REASON, EXTRACT = "<reason>one two three four</reason>", "<extract>one two</extract>"
EVIOMNI = transcript(
    segment("policy", REASON + EXTRACT),
    passages=[{"title": "T", "text": "word " * 8}, {"title": "", "text": "word " * 2}],
    answers={"rationale": "Paris</answer>", "evidence": "<answer>in Paris</answer>", "full": "<answer>Rome</answer>"},
)


def test_eviomnis_three_answers_and_lengths_in_words(tmp_path: Path) -> None:
    (entry,) = score_lines(tmp_path, "eviomni", EVIOMNI)
    parts = entry["parts"]
    answers = [parts[f"answer_{name}"] for name in ("rationale", "evidence", "full")]
    assert answers == pytest.approx([1, 2 / 3, 0]) and parts["answer"] == pytest.approx(5 / 9)
    # 4 words to 2: sigmoid((2 - 1) / .5); 2 of 10: (1 - .2) ** .5, below omega .9.
    assert parts["length_rationale"] == pytest.approx(0.8807970779778823)
    assert parts["length_evidence"] == pytest.approx(0.8**0.5)
    assert parts["format"] == 1 and entry["answer"] == "Rome" and not parts["em"]
    assert entry["reward"] == pytest.approx(0.8 * 5 / 9 + 0.1 * parts["length"] + 0.1)
    assert score_lines(tmp_path, "lear", EVIOMNI) == [entry]
    (narrow,) = score_lines(tmp_path, "eviomni", EVIOMNI, options={"full": False, "evidence": False})
    assert narrow["parts"]["answer"] == 1


def test_answers_and_stored_branches_are_one_thing_stored_twice(tmp_path: Path) -> None:
    stored = {
        name: [segment("prompt", "Paris <answer>"), segment("policy", text)]
        for name, text in EVIOMNI["answers"].items()
    }
    as_stored = {key: value for key, value in EVIOMNI.items() if key != "answers"} | {"branches": stored}
    assert score_lines(tmp_path, "eviomni", as_stored) == score_lines(tmp_path, "eviomni", EVIOMNI)
    # The context of a branch is not the policy's, whatever it holds.
    faked = as_stored | {
        "branches": {"evidence": [segment("prompt", "<answer>Paris</answer>"), segment("policy", "Rome")]}
    }
    assert score_lines(tmp_path, "eviomni", faked)[0]["parts"]["answer_evidence"] == 0


def test_lengths_in_tokens_where_a_tokenizer_is_given(tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    tiny_tokenizer.save(tmp_path / "tokenizer")
    (in_words,) = score_lines(tmp_path, "eviomni", EVIOMNI)
    (in_tokens,) = score_lines(tmp_path, "eviomni", EVIOMNI, tokenizer=tmp_path / "tokenizer")
    lengths = [len(tiny_tokenizer.encode(text)) for text in ("one two", "word " * 8, "word " * 2)]
    assert in_tokens["parts"]["length_evidence"] == pytest.approx((1 - lengths[0] / (lengths[1] + lengths[2])) ** 0.5)
    assert in_tokens["parts"]["length_evidence"] != in_words["parts"]["length_evidence"]
    command = ["score", "--system", "eviomni", "--transcripts", str(tmp_path / "in.jsonl")]
    out = tmp_path / "again.jsonl"
    assert cli.run([*command, "--out", str(out), "--tokenizer", str(tmp_path / "tokenizer")]) == 0
    assert json.loads(out.read_text()) == in_tokens


ARENA = transcript(
    segment("policy", "<relevance>[1,3]</relevance><analysis>So [1] and [3].</analysis><answer>Paris</answer>"),
    passages=[{"title": "T", "text": "x"}] * 3,
)


@pytest.mark.parametrize(
    ("gold", "relevance", "reward"), [([1, 3], 1, 13), ([3, 1], 1, 13), ([3], 0.5, 2.5), ([2], 0, 2), (None, 0, 2)]
)
def test_arenas_gold_indices(tmp_path: Path, gold: list[int] | None, relevance: float, reward: float) -> None:
    (entry,) = score_lines(tmp_path, "arena", ARENA | {"gold_indices": gold})
    assert (entry["parts"]["relevance"], entry["reward"]) == (relevance, reward)
    assert entry["parts"]["bonus"] == (10 if reward == 13 else 0)
    without_passages = {key: value for key, value in ARENA.items() if key != "passages"} | {"gold_indices": gold}
    assert score_lines(tmp_path, "arena", without_passages) == [entry]


def test_a_verdict_in_the_place_of_a_judge(tmp_path: Path) -> None:
    for verdict in (True, False):
        (entry,) = score_lines(tmp_path, "arena", ARENA | {"verdict": verdict}, options={"accuracy": "judge"})
        assert entry["parts"]["accuracy"] == verdict
    (entry,) = score_lines(tmp_path, "arena", transcript(segment("policy", "no answer")), options={"accuracy": "judge"})
    assert entry["reward"] == 0, "there is nothing to give a verdict on"


NOTED = transcript(
    segment("policy", "<search>q</search>"),
    segment("retrieved", "<information>Paris</information>"),
    segment("policy", "<summary>*Paris* -perhaps-</summary><answer>Paris</answer>"),
)


@pytest.mark.parametrize(
    ("variant", "entailment", "reward"),
    [("SEN+EQR", 0.25, 1.25), ("SEN+EQR", 1, 2), ("SEN", 0.25, 1), ("SEN", None, 1)],
)
def test_evinotes_entailment(tmp_path: Path, variant: str, entailment: float | None, reward: float) -> None:
    (entry,) = score_lines(tmp_path, "evinote", NOTED | {"entailment": entailment}, options={"variant": variant})
    assert entry["reward"] == reward and entry["parts"]["entailment"] == entailment


def test_without_a_note_there_is_nothing_to_entail(tmp_path: Path) -> None:
    (entry,) = score_lines(tmp_path, "evinote", transcript(segment("policy", "<answer>Paris</answer>")))
    assert entry["reward"] == 0 and entry["parts"]["answer"] == 1


def test_the_draw_depends_on_id_and_text(tmp_path: Path) -> None:
    """FS+SR gives .1 to one noted wrong answer in three, the same one whenever it is asked."""
    wrong = [NOTED | {"id": number, "golden_answers": ["Rome"]} for number in range(60)]
    rewards = [entry["reward"] for entry in score_lines(tmp_path, "evinote", *wrong, options={"variant": "FS+SR"})]
    pieces = [TextSegment(Source(s["source"]), s["text"].encode()) for s in NOTED["segments"]]
    assert rewards == [0.1 if hash_uniform(str(number), pieces) < 1 / 3 else 0 for number in range(60)]
    assert 10 < sum(map(bool, rewards)) < 30


class Half:
    """An entailment judge that is never sure."""

    name = "half"

    def probabilities(self, pairs: Any) -> list[float]:
        return [0.5 + 0.01 * (len(pair[0]) % 7) for pair in pairs]


class Yes:
    """A chat model that takes every answer for right."""

    name = "yes"

    def rate(self, cases: Any) -> list[bool]:
        return [True for _ in cases]


@pytest.mark.parametrize("name", NAMES)
def test_what_a_run_stores_has_the_reward_that_it_had_there(
    name: str, tmp_path: Path, tiny_tokenizer: Tokenizer
) -> None:
    """To the bit, by its ids: bytes that are no character, branches and the judges' words included."""
    options = {"variant": "FS+EQR"} if name.startswith("evinote") else {}
    options |= {"accuracy": "judge"} if name == "arena" else {}
    system = load_system(name, options)
    question = Question(
        "q",
        "Where?",
        ("Paris",),
        passages=(Passage("a", "A", "In Paris."), Passage("b", "B", "Né.")),
        gold_indices=(1,),
    )
    written = {
        "eviomni": [REASON + "<extract>in Paris \xc3\x84</extract>", "<answer>Paris</answer>"],
        "arena": ["<relevance>[1]</relevance><analysis>x</analysis><answer>in Paris</answer>"],
        "naive_grpo": ["<think>x</think><answer>Paris</answer>"],
    }
    written |= {"lear": written["eviomni"]}
    worth = {*written, "evinote", "evinote_code", "eval_rar"}  # what is compared there is more than 0
    turns = written.get(name, ["<summary>*a* -b-</summary><evaluate>Paris \xff</evaluate><answer>Rome</answer>"])
    trajectory = Trajectory("q", 0, 0, [Segment(Source.PROMPT, tiny_tokenizer.encode("Where?"))], "answered")
    for text in turns:
        ids = tiny_tokenizer.byte_ids(text.encode("latin-1"))  # a character cut in two is in them
        trajectory.segments.append(Segment(Source.POLICY, ids, [-1.0] * len(ids)))
    if len(turns) == 2:
        said = tiny_tokenizer.encode("Paris</answer>")
        branch = [Segment(Source.PROMPT, tiny_tokenizer.encode("<answer>")), Segment(Source.POLICY, said)]
        trajectory.branches = {kind: Trajectory("q", 0, 0, branch) for kind in ("rationale", "evidence")}
    (expected,) = score([question], [trajectory], system, tiny_tokenizer, Judges(entailment=Half(), verdict=Yes()))
    tiny_tokenizer.save(tmp_path / "tokenizer")
    record = expected.to_dict(tiny_tokenizer)
    (scored,) = score_lines(tmp_path, name, record, options=options, tokenizer=tmp_path / "tokenizer")
    assert (scored["reward"], scored["parts"]) == (expected.result.reward, expected.result.parts)
    assert scored["answer"] == expected.result.answer and (scored["reward"] > 0 or name not in worth)


BAD = [
    ("{", "in.jsonl:2: not valid JSON"),
    ("[1]", "in.jsonl:2: expected a JSON object, found a list"),
    (b'{"id": "\xff"}', "in.jsonl:2: not valid UTF-8"),
    ({}, "in.jsonl:2: expected an object with id, golden_answers and a list of segments"),
    ({"id": "a", "golden_answers": ["x"]}, "in.jsonl:2: expected an object with id"),
    ({"golden_answers": ["x"], "segments": []}, "in.jsonl:2: expected an object with id"),
    (transcript() | {"segments": {}}, "in.jsonl:2: expected an object with id"),
    (transcript() | {"id": float("nan")}, "in.jsonl:2: id: expected a string or a whole number, got nan"),
    (transcript() | {"id": True}, "in.jsonl:2: id: expected a string or a whole number, got True"),
    (transcript() | {"id": None}, "in.jsonl:2: id: expected a string or a whole number, got None"),
    (transcript() | {"golden_answers": "Paris"}, "in.jsonl:2: golden_answers: expected a list of strings, got Paris"),
    (transcript() | {"golden_answers": [1]}, "in.jsonl:2: golden_answers: expected a list of strings"),
    (transcript() | {"golden_answers": None}, "in.jsonl:2: golden_answers: expected a list of strings"),
    (transcript(RIGHT, segment("model", "x")), "in.jsonl:2: segment 1: expected a text and a source of prompt, policy"),
    (transcript({"source": "policy"}), "in.jsonl:2: segment 0: expected a text"),
    (transcript({"source": "policy", "text": None}), "in.jsonl:2: segment 0: expected a text"),
    (transcript({"source": ["policy"], "text": "x"}), "in.jsonl:2: segment 0: expected a text"),
    (transcript() | {"segments": ["policy"]}, "in.jsonl:2: segment 0: expected a text"),
    (transcript(question=3), "in.jsonl:2: question: expected a string, got 3"),
    (transcript(passages={}), "in.jsonl:2: passages: expected a list of objects with title and text"),
    (transcript(passages=["x"]), "in.jsonl:2: passages: expected a list of objects with title and text"),
    (transcript(passages=[{"text": "x"}, {"title": "y"}]), 'in.jsonl:2: passages, item 2: no "text" in this record'),
    (transcript(gold_indices="1"), "in.jsonl:2: gold_indices: expected a list of whole numbers, got 1"),
    (transcript(gold_indices=[True]), "in.jsonl:2: gold_indices: expected a list of whole numbers"),
    (transcript(gold_indices=[0]), "in.jsonl:2: gold_indices names number 0 of the passages; they count from 1"),
    (
        transcript(passages=[{"text": "x"}], gold_indices=[1, 2]),
        "in.jsonl:2: gold_indices names number 2 of 1 passages; they count from 1",
    ),
    (transcript(answers={"raw": "x"}), "in.jsonl:2: answers: expected texts under rationale, evidence, full"),
    (transcript(answers={"full": 1}), "in.jsonl:2: answers: expected texts under rationale, evidence, full"),
    (transcript(branches={"full": "x"}), "in.jsonl:2: branches: expected lists of segments by name"),
    (transcript(branches={"full": [3]}), "in.jsonl:2: branch full: segment 0: expected a text and a source"),
    (
        transcript(branches={"full": []}, answers={"full": ""}),
        "in.jsonl:2: full is among both the answers and the branches",
    ),
    (transcript(entailment=1.5), "in.jsonl:2: entailment: expected a number from 0 to 1, got 1.5"),
    (transcript(entailment="high"), "in.jsonl:2: entailment: expected a number from 0 to 1, got high"),
    (transcript(entailment=True), "in.jsonl:2: entailment: expected a number from 0 to 1"),
    (transcript(verdict=1), "in.jsonl:2: verdict: expected true or false, got 1"),
]


@pytest.mark.parametrize(("bad", "problem"), BAD)
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.fast_cases(24)
def test_a_malformed_line_ends_in_a_sentence_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], system: str, bad: Any, problem: str
) -> None:
    line = bad if isinstance(bad, bytes) else (bad if isinstance(bad, str) else json.dumps(bad)).encode()
    (tmp_path / "in.jsonl").write_bytes(json.dumps(transcript(RIGHT)).encode() + b"\n" + line + b"\n")
    command = ["score", "--system", system, "--transcripts", str(tmp_path / "in.jsonl")]
    assert cli.run([*command, "--out", str(tmp_path / "out.jsonl")]) == 2
    message = capsys.readouterr().err
    assert message.startswith("thresher: ") and message.count("\n") == 1 and problem in message
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(
    ("system", "options", "record", "problem"),
    [
        ("evinote", {}, NOTED, "in.jsonl:1: evinote is rewarded for entailment, and no judge is asked here; add"),
        ("evinote", {"variant": "FS+EQR"}, NOTED, "in.jsonl:1: evinote is rewarded for entailment"),
        ("arena", {"accuracy": "judge"}, ARENA, "in.jsonl:1: arena is rewarded by a judge's verdict"),
    ],
)
def test_a_judges_word_that_is_missing(
    tmp_path: Path, system: str, options: dict[str, str], record: dict[str, Any], problem: str
) -> None:
    write(tmp_path / "in.jsonl", record)
    with pytest.raises(UserError, match=problem):
        score_file(system, options, tmp_path / "in.jsonl", tmp_path / "out.jsonl")


@pytest.mark.parametrize("ids", [[1, 2], "ab", [10**9], [True]])
def test_ids_of_another_tokenizer_are_refused(tmp_path: Path, tiny_tokenizer: Tokenizer, ids: Any) -> None:
    tiny_tokenizer.save(tmp_path / "tokenizer")
    write(tmp_path / "in.jsonl", transcript(RIGHT | {"ids": ids}))
    with pytest.raises(UserError, match=r"in.jsonl:1: segment 0: its ids are not its text in this tokenizer; give the"):
        score_file("search_r1", {}, tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "tokenizer")
    exact = transcript(RIGHT | {"ids": tiny_tokenizer.encode(RIGHT["text"])})
    assert score_lines(tmp_path, "search_r1", exact, tokenizer=tmp_path / "tokenizer")[0]["reward"] == 1


def test_nothing_to_rate_leaves_an_older_file_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("\n")
    (tmp_path / "out.jsonl").write_text("of yesterday")
    with pytest.raises(UserError, match="holds no transcript"):
        score_file("eval_rar", {}, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == "of yesterday"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize(
    ("system", "options", "problem"),
    [
        ("evalrar", {}, "system 'evalrar' is unknown; did you mean eval_rar?"),
        ("eval_rar", {"substrings": True}, r"\[system.options\]: substrings: unknown key; did you mean substring\?"),
        ("eval_rar", {"substring": 1}, "substring: expected true or false, got 1"),
        ("search_r1", {"substring": True}, "substring: unknown key"),
    ],
)
def test_an_unknown_system_or_switch_is_refused(
    tmp_path: Path, system: str, options: dict[str, Any], problem: str
) -> None:
    write(tmp_path / "in.jsonl", transcript(RIGHT))
    with pytest.raises(UserError, match=problem):
        score_file(system, options, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("kind", ["absent input", "absent folder"])
def test_paths_that_are_not_there(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "in.jsonl", transcript(RIGHT))
    source = tmp_path / ("none.jsonl" if kind == "absent input" else "in.jsonl")
    out = tmp_path / ("out.jsonl" if kind == "absent input" else "none/out.jsonl")
    with pytest.raises(UserError, match="no such file" if kind == "absent input" else "does not exist; make it first"):
        score_file("eval_rar", {}, source, out)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
