"""`thresher score`: anyone's transcripts, rated by a system's own reward, or refused by file and line."""

import json
from pathlib import Path
from typing import Any

import pytest

from thresher.engine import cli
from thresher.engine.score import score_file
from thresher.rewards.errors import UserError

SYSTEMS = ("eval_rar", "search_r1")


def segment(source: str, text: str) -> dict[str, str]:
    return {"source": source, "text": text}


def transcript(*segments: dict[str, str], golds: list[str] | None = None, id: Any = "a", **more: Any) -> dict[str, Any]:
    golds = ["Paris"] if golds is None else golds
    return {"id": id, "question": "Where?", "golden_answers": golds, "segments": list(segments), **more}


RIGHT = segment("policy", "<think>x</think><answer> Paris </answer>")
CITED = segment("policy", "<evaluate>It is in Paris.</evaluate><answer>Rome</answer>")
FAKED = [segment(source, "<answer>Paris</answer>") for source in ("prompt", "retrieved", "feedback")]


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def score(tmp_path: Path, system: str, *records: Any, options: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    source, out = write(tmp_path / "in.jsonl", *records), tmp_path / "out.jsonl"
    figures = score_file(system, options or {}, source, out)
    rated = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert figures == {
        "transcripts": len(records),
        "reward": pytest.approx(sum(entry["reward"] for entry in rated) / len(rated)),
    }
    return rated


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
        (entry,) = score(tmp_path, system, transcript(*segments))
        assert list(entry) == ["id", "reward", "parts", "answer"]
        assert entry["reward"] == expected
        assert entry["answer"] == answer
        assert entry["parts"]["em"] == (expected == 1) and entry["parts"]["answered"] == (answer is not None)


def test_parts_of_each_system(tmp_path: Path) -> None:
    common = {"em": False, "f1": 0.0, "answered": True, "searches": 1}
    searched = transcript(segment("policy", "<search>q</search>"), FAKED[1], CITED)
    (entry,) = score(tmp_path, "search_r1", searched)
    assert entry["parts"] == common
    (entry,) = score(tmp_path, "eval_rar", searched)
    assert entry["parts"] == common | {"evaluations": 1, "evaluate_contains": True}


def test_order_and_ids_are_kept_and_golds_are_alternatives(tmp_path: Path) -> None:
    records = [
        transcript(RIGHT, golds=golds, id=id) for id, golds in (("b", ["Rome"]), (7, ["Rome", "PARIS."]), ("é", []))
    ]
    rated = score(tmp_path, "search_r1", *records)
    assert [(entry["id"], entry["reward"]) for entry in rated] == [("b", 0.0), (7, 1.0), ("é", 0.0)]


def test_the_trajectories_of_a_run_can_be_scored(tmp_path: Path) -> None:
    """What the run folder holds has more keys, and ids beside every text."""
    more = {"group": 0, "sample": 1, "reason": "answered", "searches": [], "reward": 1.0, "advantage": 0.5}
    (entry,) = score(tmp_path, "eval_rar", transcript(RIGHT | {"ids": [1, 2]}, **more))
    assert entry["reward"] == 1.0


def test_text_that_is_no_unicode_is_rated_all_the_same(tmp_path: Path) -> None:
    (entry,) = score(tmp_path, "search_r1", transcript(segment("policy", "\ud800<answer>Paris</answer>\udfff")))
    assert entry["reward"] == 1.0


@pytest.mark.parametrize(
    ("options", "expected"), [({}, 0.1), ({"evaluation_reward": False}, 0.0), ({"count_before_search": False}, 0.0)]
)
def test_switches_of_the_system(tmp_path: Path, options: dict[str, Any], expected: float) -> None:
    assert score(tmp_path, "eval_rar", transcript(CITED), options=options)[0]["reward"] == expected
    flags = [part for key, value in options.items() for part in ("--set", f"{key}={str(value).lower()}")]
    out = tmp_path / "again.jsonl"
    command = ["score", "--system", "eval_rar", "--transcripts", str(tmp_path / "in.jsonl"), "--out", str(out), *flags]
    assert cli.run(command) == 0
    assert out.read_bytes() == (tmp_path / "out.jsonl").read_bytes()


BAD = [
    ("{", "in.jsonl:2: not valid JSON"),
    ("[1]", "in.jsonl:2: expected a JSON object, found a list"),
    (b'{"id": "\xff"}', "in.jsonl:2: not valid UTF-8"),
    ({}, "in.jsonl:2: expected an object with id, golden_answers and a list of segments"),
    ({"id": "a", "golden_answers": ["x"]}, "in.jsonl:2: expected an object with id"),
    ({"golden_answers": ["x"], "segments": []}, "in.jsonl:2: expected an object with id"),
    (transcript() | {"segments": {}}, "in.jsonl:2: expected an object with id"),
    (transcript() | {"golden_answers": "Paris"}, "in.jsonl:2: golden_answers: expected a list of strings, got Paris"),
    (transcript() | {"golden_answers": [1]}, "in.jsonl:2: golden_answers: expected a list of strings"),
    (transcript() | {"golden_answers": None}, "in.jsonl:2: golden_answers: expected a list of strings"),
    (transcript(RIGHT, segment("model", "x")), "in.jsonl:2: segment 1: expected a text and a source of prompt, policy"),
    (transcript({"source": "policy"}), "in.jsonl:2: segment 0: expected a text"),
    (transcript({"source": "policy", "text": None}), "in.jsonl:2: segment 0: expected a text"),
    (transcript({"source": ["policy"], "text": "x"}), "in.jsonl:2: segment 0: expected a text"),
    (transcript() | {"segments": ["policy"]}, "in.jsonl:2: segment 0: expected a text"),
]


@pytest.mark.parametrize(("bad", "told"), BAD)
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_malformed_line_ends_in_a_sentence_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], system: str, bad: Any, told: str
) -> None:
    line = bad if isinstance(bad, bytes) else (bad if isinstance(bad, str) else json.dumps(bad)).encode()
    (tmp_path / "in.jsonl").write_bytes(json.dumps(transcript(RIGHT)).encode() + b"\n" + line + b"\n")
    command = ["score", "--system", system, "--transcripts", str(tmp_path / "in.jsonl")]
    assert cli.run([*command, "--out", str(tmp_path / "out.jsonl")]) == 2
    message = capsys.readouterr().err
    assert message.startswith("thresher: ") and message.count("\n") == 1 and told in message
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_nothing_to_rate_leaves_an_older_file_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("\n")
    (tmp_path / "out.jsonl").write_text("of yesterday")
    with pytest.raises(UserError, match="holds no transcript"):
        score_file("eval_rar", {}, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == "of yesterday"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize(
    ("system", "options", "told"),
    [
        ("evalrar", {}, "system 'evalrar' is unknown; choose one of eval_rar, search_r1"),
        ("eval_rar", {"substrings": True}, r"\[system.options\]: substrings: unknown key; did you mean substring\?"),
        ("eval_rar", {"substring": 1}, "substring: expected true or false, got 1"),
        ("search_r1", {"substring": True}, "substring: unknown key"),
    ],
)
def test_an_unknown_system_or_switch_is_refused(
    tmp_path: Path, system: str, options: dict[str, Any], told: str
) -> None:
    write(tmp_path / "in.jsonl", transcript(RIGHT))
    with pytest.raises(UserError, match=told):
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
