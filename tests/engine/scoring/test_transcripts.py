"""`thresher score`: transcripts of any origin, scored by a system's own reward, or refused with file and line."""

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
    rewards = [entry["reward"] for entry in scored if entry["reward"] is not None]
    lacking = len(scored) - len(rewards)
    assert figures == {"transcripts": len(records), "reward": pytest.approx(sum(rewards) / len(rewards))} | (
        {"without_golds": lacking} if lacking else {}
    )
    return scored


def test_what_is_read_of_the_segments(tmp_path: Path) -> None:
    """Adjacent policy segments are joined; a passage between them splits a tag."""
    split = [segment("policy", "<ans"), segment("policy", "wer>the paris</answer>")]
    records = [
        transcript(RIGHT),
        transcript(segment("policy", "<search>q</search>"), *FAKED, CITED),
        transcript(*split),
        transcript(split[0], segment("retrieved", "-"), split[1]),
        transcript(),
    ]
    for system, rewards in (("eval_rar", [1.0, 0.1, 1.0, 0.0, 0.0]), ("search_r1", [1.0, 0.0, 1.0, 0.0, 0.0])):
        scored = score_lines(tmp_path, system, *records)
        assert list(scored[0]) == ["id", "reward", "parts", "answer"]
        assert [entry["reward"] for entry in scored] == rewards
        assert [entry["answer"] for entry in scored] == ["Paris", "Rome", "the paris", None, None]
        parts = {"answer": 0.0, "em": False, "f1": 0.0, "answered": True, "searches": 1}
        parts |= {"evaluation": 0.1, "evaluations": 1, "evaluate_contains": True} if system == "eval_rar" else {}
        assert scored[1]["parts"] == parts


def test_order_and_ids_are_kept_and_golds_are_alternatives(tmp_path: Path) -> None:
    """Additional keys of a run folder, and text that is not Unicode, do no harm."""
    more = {"group": 0, "sample": 1, "reason": "answered", "searches": [], "reward": 1.0, "advantage": 0.5}
    broken = segment("policy", "\ud800<answer>Paris</answer>\udfff")
    records = [
        *(transcript(RIGHT, golds=golds, id=id) for id, golds in (("b", ["Rome"]), (7, ["Rome", "PARIS."]), ("é", []))),
        transcript(RIGHT | {"ids": [1, 2]}, **more),
        transcript(broken, id=0),
    ]
    scored = score_lines(tmp_path, "search_r1", *records)
    # A reward that needs gold answers is None where there are none, as in an evaluation.
    expected = [("b", 0.0), (7, 1.0), ("é", None), ("a", 1.0), (0, 1.0)]
    assert [(entry["id"], entry["reward"]) for entry in scored] == expected


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


# --- Systems that need more than the segments

REASON, EXTRACT = "<reason>one two three four</reason>", "<extract>one two</extract>"
EVIOMNI = transcript(
    segment("policy", REASON + EXTRACT),
    passages=[{"title": "T", "text": "word " * 8}, {"title": "", "text": "word " * 2}],
    answers={"rationale": "Paris</answer>", "evidence": "<answer>in Paris</answer>", "full": "<answer>Rome</answer>"},
)


def test_eviomnis_three_answers_and_lengths_in_words_or_tokens(tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    (entry,) = score_lines(tmp_path, "eviomni", EVIOMNI)
    parts = entry["parts"]
    assert [parts[f"answer_{name}"] for name in ("rationale", "evidence", "full")] == pytest.approx([1, 2 / 3, 0])
    # 4 words against 2: sigmoid((2 - 1) / .5); 2 of 10: (1 - .2) ** .5, below omega .9.
    lengths = [parts["length_rationale"], parts["length_evidence"]]
    assert lengths == pytest.approx([0.8807970779778823, 0.8**0.5])
    assert score_lines(tmp_path, "lear", EVIOMNI) == [entry]
    (narrow,) = score_lines(tmp_path, "eviomni", EVIOMNI, options={"full": False, "evidence": False})
    assert narrow["parts"]["answer"] == 1
    tokenizer = tmp_path / "tokenizer"
    tiny_tokenizer.save(tokenizer)
    (in_tokens,) = score_lines(tmp_path, "eviomni", EVIOMNI, tokenizer=tokenizer)
    evidence, *passages = (len(tiny_tokenizer.encode(text)) for text in ("one two", "word " * 8, "word " * 2))
    assert in_tokens["parts"]["length_evidence"] == pytest.approx((1 - evidence / sum(passages)) ** 0.5) != lengths[1]
    out = tmp_path / "again.jsonl"
    command = ["score", "--system", "eviomni", "--transcripts", str(tmp_path / "in.jsonl"), "--out", str(out)]
    assert cli.run([*command, "--tokenizer", str(tokenizer)]) == 0 and json.loads(out.read_text()) == in_tokens


def test_answers_and_stored_branches_are_one_thing_stored_twice(tmp_path: Path) -> None:
    stored = {
        name: [segment("prompt", "Paris <answer>"), segment("policy", text)]
        for name, text in EVIOMNI["answers"].items()
    }
    as_stored = {key: value for key, value in EVIOMNI.items() if key != "answers"} | {"branches": stored}
    assert score_lines(tmp_path, "eviomni", as_stored) == score_lines(tmp_path, "eviomni", EVIOMNI)
    # The context of a branch is not the policy's text, whatever it contains.
    faked = as_stored | {
        "branches": {"evidence": [segment("prompt", "<answer>Paris</answer>"), segment("policy", "Rome")]}
    }
    assert score_lines(tmp_path, "eviomni", faked)[0]["parts"]["answer_evidence"] == 0


ARENA = transcript(
    segment("policy", "<relevance>[1,3]</relevance><analysis>So [1] and [3].</analysis><answer>Paris</answer>"),
    passages=[{"title": "T", "text": "x"}] * 3,
)


NOTED = transcript(
    segment("policy", "<search>q</search>"),
    segment("retrieved", "<information>Paris</information>"),
    segment("policy", "<summary>*Paris* -perhaps-</summary><answer>Paris</answer>"),
)


SILENT = transcript(segment("policy", "<answer>Paris</answer>"))  # without a note, so that nothing is entailed
MORE: list[tuple[str, dict[str, Any], dict[str, Any], float, dict[str, Any]]] = [
    # system, options, record; reward, some of its parts
    ("arena", {}, ARENA | {"gold_indices": [3, 1]}, 13, {"relevance": 1, "bonus": 10}),
    ("arena", {}, ARENA | {"gold_indices": [3]}, 2.5, {"relevance": 0.5, "bonus": 0}),
    ("arena", {}, ARENA | {"gold_indices": [3], "passages": []}, 2.5, {"relevance": 0.5}),
    ("arena", {}, ARENA | {"gold_indices": None}, 2, {"relevance": 0}),
    ("arena", {"accuracy": "judge"}, ARENA | {"verdict": True}, 2, {"accuracy": 1}),
    ("arena", {"accuracy": "judge"}, ARENA | {"verdict": False}, 1, {"accuracy": 0}),
    ("arena", {"accuracy": "judge"}, transcript(segment("policy", "no answer")), 0, {}),
    ("evinote", {"variant": "SEN+EQR"}, NOTED | {"entailment": 0.25}, 1.25, {"entailment": 0.25}),
    ("evinote", {"variant": "SEN"}, NOTED | {"entailment": 0.25}, 1, {"entailment": 0.25}),
    ("evinote", {"variant": "SEN"}, NOTED | {"entailment": None}, 1, {"entailment": None}),
    ("evinote", {}, SILENT, 0, {"answer": 1}),
]


@pytest.mark.parametrize(("system", "options", "record", "reward", "parts"), MORE)
def test_what_some_systems_look_at_besides(
    tmp_path: Path, system: str, options: dict[str, Any], record: dict[str, Any], reward: float, parts: dict[str, Any]
) -> None:
    (entry,) = score_lines(tmp_path, system, record, options=options)
    assert entry["reward"] == reward and entry["parts"] | parts == entry["parts"]


def test_the_draw_depends_on_id_and_text(tmp_path: Path) -> None:
    """FS+SR gives .1 to one noted wrong answer in three, always to the same one."""
    wrong = [NOTED | {"id": number, "golden_answers": ["Rome"]} for number in range(60)]
    rewards = [entry["reward"] for entry in score_lines(tmp_path, "evinote", *wrong, options={"variant": "FS+SR"})]
    pieces = [TextSegment(Source(s["source"]), s["text"].encode()) for s in NOTED["segments"]]
    assert rewards == [0.1 if hash_uniform(str(number), pieces) < 1 / 3 else 0 for number in range(60)]
    assert 10 < sum(map(bool, rewards)) < 30


class Half:
    """An entailment judge that is always uncertain."""

    name = "half"

    def probabilities(self, pairs: Any) -> list[float]:
        return [0.5 + 0.01 * (len(pair[0]) % 7) for pair in pairs]


class Yes:
    """A chat model that accepts every answer."""

    name = "yes"

    def rate(self, cases: Any) -> list[bool]:
        return [True for _ in cases]


@pytest.mark.parametrize("name", NAMES)
def test_what_a_run_stores_has_the_reward_that_it_had_there(
    name: str, tmp_path: Path, tiny_tokenizer: Tokenizer
) -> None:
    """Equal to the bit, from its ids, including bytes that are no character, branches and the judges' results."""
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
    worth = {*written, "evinote", "evinote_code", "eval_rar"}  # the rewards compared for these are above 0
    turns = written.get(name, ["<summary>*a* -b-</summary><evaluate>Paris \xff</evaluate><answer>Rome</answer>"])
    trajectory = Trajectory("q", 0, 0, [Segment(Source.PROMPT, tiny_tokenizer.encode("Where?"))], "answered")
    for text in turns:
        ids = tiny_tokenizer.byte_ids(text.encode("latin-1"))  # a character cut in two is among them
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


# Messages for the second line, and lines that cause them.
BAD: dict[str, list[Any]] = {
    "not valid JSON": ["{"],
    "expected a JSON object, found a list": ["[1]"],
    "not valid UTF-8": [b'{"id": "\xff"}'],
    "expected an object with id, golden_answers and a list of segments": [
        {},
        {"id": "a", "golden_answers": ["x"]},
        {"golden_answers": ["x"], "segments": []},
        transcript() | {"segments": {}},
    ],
    "id: expected a string or a whole number, got nan": [transcript(id=float("nan"))],
    "id: expected a string or a whole number, got True": [transcript(id=True)],
    "id: expected a string or a whole number, got None": [transcript(id=None)],
    "golden_answers: expected a list of strings, got ": [
        transcript() | {"golden_answers": golds} for golds in ("Paris", [1], None)
    ],
    "segment 1: expected a text and a source of prompt, policy": [transcript(RIGHT, segment("model", "x"))],
    "segment 0: expected a text": [
        transcript() | {"segments": [broken]}
        for broken in (
            {"source": "policy"},
            {"source": "policy", "text": None},
            {"source": ["policy"], "text": "x"},
            "policy",
        )
    ],
    "question: expected a string, got 3": [transcript(question=3)],
    "passages: expected a list of objects with title and text": [transcript(passages={}), transcript(passages=["x"])],
    'passages, item 2: no "text" in this record': [transcript(passages=[{"text": "x"}, {"title": "y"}])],
    "gold_indices: expected a list of whole numbers, got ": [transcript(gold_indices=wrong) for wrong in ("1", [True])],
    "gold_indices names number 0 of the passages; they count from 1": [transcript(gold_indices=[0])],
    "gold_indices names number 2 of 1 passages; they count from 1": [
        transcript(passages=[{"text": "x"}], gold_indices=[1, 2])
    ],
    "answers: expected texts under rationale, evidence, full": [
        transcript(answers={"raw": "x"}),
        transcript(answers={"full": 1}),
    ],
    "branches: expected lists of segments by name": [transcript(branches={"full": "x"})],
    "branch full: segment 0: expected a text and a source": [transcript(branches={"full": [3]})],
    "full is among both the answers and the branches": [transcript(branches={"full": []}, answers={"full": ""})],
    "entailment: expected a number from 0 to 1, got ": [transcript(entailment=wrong) for wrong in (1.5, "high", True)],
    "verdict: expected true or false, got 1": [transcript(verdict=1)],
}


@pytest.mark.parametrize(("bad", "problem"), [(bad, problem) for problem, lines in BAD.items() for bad in lines])
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
    assert message.startswith("thresher: ") and message.count("\n") == 1 and f"in.jsonl:2: {problem}" in message
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


JUDGED = "and no judge runs here; add"


@pytest.mark.parametrize(
    ("system", "options", "records", "problem"),
    [
        ("evinote", {}, [NOTED], f"in.jsonl:1: evinote is rewarded for entailment, {JUDGED}"),
        ("evinote", {"variant": "FS+EQR"}, [NOTED], "in.jsonl:1: evinote is rewarded for entailment"),
        ("arena", {"accuracy": "judge"}, [ARENA], f"in.jsonl:1: arena is rewarded by a judge's verdict, {JUDGED}"),
        ("eval_rar", {}, [], "holds no transcript"),
        ("evalrar", {}, [transcript(RIGHT)], "system 'evalrar' is unknown; did you mean eval_rar?"),
        (
            "eval_rar",
            {"substrings": True},
            [],
            r"\[system.options\]: substrings: unknown key; did you mean substring\?",
        ),
        ("eval_rar", {"substring": 1}, [transcript(RIGHT)], "substring: expected true or false, got 1"),
        ("search_r1", {"substring": True}, [transcript(RIGHT)], "substring: unknown key"),
    ],
)
def test_what_cannot_be_rated_leaves_an_older_file_as_it_was(
    tmp_path: Path, system: str, options: dict[str, Any], records: list[Any], problem: str
) -> None:
    write(tmp_path / "in.jsonl", *records)
    (tmp_path / "out.jsonl").write_text("of yesterday")
    with pytest.raises(UserError, match=problem):
        score_file(system, options, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == "of yesterday"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize("ids", [[1, 2], "ab", [10**9], [True]])
def test_ids_of_another_tokenizer_are_refused(tmp_path: Path, tiny_tokenizer: Tokenizer, ids: Any) -> None:
    tiny_tokenizer.save(tmp_path / "tokenizer")
    write(tmp_path / "in.jsonl", transcript(RIGHT | {"ids": ids}))
    with pytest.raises(UserError, match=r"in.jsonl:1: segment 0: its ids do not decode to its text; give the"):
        score_file("search_r1", {}, tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "tokenizer")
    exact = transcript(RIGHT | {"ids": tiny_tokenizer.encode(RIGHT["text"])})
    assert score_lines(tmp_path, "search_r1", exact, tokenizer=tmp_path / "tokenizer")[0]["reward"] == 1


def test_paths_that_are_not_there(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", transcript(RIGHT))
    for source, out, problem in (
        ("none.jsonl", "out.jsonl", "no such file"),
        ("in.jsonl", "none/out.jsonl", "does not exist; make it first"),
    ):
        with pytest.raises(UserError, match=problem):
            score_file("eval_rar", {}, tmp_path / source, tmp_path / out)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
