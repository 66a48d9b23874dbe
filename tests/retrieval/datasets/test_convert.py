"""Test the conversion of question sets: sampling, mixing, counting, pooling, and the summary of a converted file."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from thresher.cli import main as cli
from thresher.common.errors import UserError
from thresher.retrieval.corpus import read_corpus
from thresher.retrieval.datasets.convert import (
    ID_AGAIN,
    RENAMED,
    MixSource,
    convert,
    draw,
    parse_mix,
    read_aliases,
)
from thresher.retrieval.datasets.formats import NO_ANSWER, content_id
from thresher.retrieval.datasets.summary import excerpt, spread, summarize
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question, read_questions


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def plain(path: Path, count: int, name: str = "q") -> Path:
    return write(path, *({"id": f"{name}{n}", "question": f"{name} {n}?", "answer": f"{n}"} for n in range(count)))


def hotpot(path: Path, *contexts: list[tuple[str, str]]) -> Path:
    """Write questions with paragraphs, the first of which is gold."""
    return write(
        path,
        *(
            {
                "_id": f"h{number}",
                "question": f"h {number}?",
                "answer": "a",
                "supporting_facts": [[context[0][0], 0]],
                "context": [[title, [text]] for title, text in context],
            }
            for number, context in enumerate(contexts)
        ),
    )


def ids(path: Path) -> list[str]:
    return [question.id for question in read_questions(path)]


def test_what_is_left_out_is_counted_and_listed(tmp_path: Path) -> None:
    asked = {"question": "q?", "answer": "a"}
    first = write(tmp_path / "a.jsonl", {**asked, "id": "x"}, {**asked, "id": "y", "answer": ""}, {**asked, "id": "x"})
    second = write(tmp_path / "b.jsonl", asked, {"question": " ", "answer": "a"})
    out, skipped = tmp_path / "out.jsonl", tmp_path / "skipped.jsonl"
    figures = convert([MixSource(paths=(first, second))], out, skipped=skipped)
    assert ids(out) == ["x", "3"]  # the row numbers continue from file to file
    reasons = {NO_ANSWER: 1, "the id and the question were there before": 1, "no question": 1}
    [source] = figures["sources"]
    assert (source["records"], source["kept"], source["skipped"]) == (5, 2, reasons)
    assert [json.loads(line) for line in skipped.read_text().splitlines()] == [
        {"source": "questions", "where": f"{first}:2", "id": "y", "reason": NO_ANSWER},
        {"source": "questions", "where": f"{first}:3", "id": "x", "reason": ID_AGAIN},
        {"source": "questions", "where": f"{second}:2", "id": "4", "reason": "no question"},
    ]


def test_another_question_under_an_id_is_kept(tmp_path: Path) -> None:
    """Search-R1's training file is merged from sets that each number their questions from 0."""
    model = {"reward_model": {"ground_truth": {"target": ["a"]}}, "prompt": [{"role": "user", "content": "x"}]}
    rows = [
        {"id": "train_0", "question": question, "data_source": source, **model}
        for question, source in (("one?", "nq"), ("two?", "hotpotqa"), ("two?", "hotpotqa"), ("one?", "nq"))
    ]
    out = tmp_path / "out.jsonl"
    figures = convert([MixSource(paths=(write(tmp_path / "train.jsonl", *rows),))], out)
    first, second = read_questions(out)
    assert (first.id, first.question, second.question) == ("train_0", "one?", "two?")
    assert second.id == f"train_0#{content_id('', 'two?')}" and second.metadata["data_source"] == "hotpotqa"
    [source] = figures["sources"]
    assert source["skipped"] == {ID_AGAIN: 2} and source["notes"] == {RENAMED: 2}


def test_without_a_seed_the_first_are_taken_and_reading_stops(tmp_path: Path) -> None:
    path = plain(tmp_path / "a.jsonl", 5)
    with path.open("a") as file:
        file.write("broken\n")
    out = tmp_path / "out.jsonl"
    figures = convert([MixSource(paths=(path,), count=3)], out)
    assert ids(out) == ["q0", "q1", "q2"] and figures["sources"][0]["records"] == 3
    before = out.read_bytes()
    with pytest.raises(UserError, match=r"a\.jsonl:6: not valid JSON"):
        convert([MixSource(paths=(path,))], out)
    assert out.read_bytes() == before and sorted(tmp_path.iterdir()) == [path, out]


def test_a_seed_draws_by_lot_and_again_the_same(tmp_path: Path) -> None:
    path, out = plain(tmp_path / "a.jsonl", 50), tmp_path / "out.jsonl"
    drawn = []
    for seed in (1, 1, 2, None):
        convert([MixSource(paths=(path,), count=20)], out, seed=seed)
        drawn.append(ids(out))
    assert drawn[0] == drawn[1] != drawn[2] and len(set(drawn[0])) == 20
    assert sorted(drawn[0]) != sorted(drawn[2]) and drawn[0] != sorted(drawn[0])
    convert([MixSource(paths=(path,))], out, seed=1)
    assert ids(out) != ids(path) and sorted(ids(out)) == sorted(ids(path))


def test_every_question_is_as_likely_as_another() -> None:
    questions = [Question(str(number), "q?", ("a",)) for number in range(6)]
    counts = Counter(question.id for seed in range(1200) for question in draw(questions, 2, str(seed)))
    first = Counter(next(iter(draw(questions, 2, str(seed)))).id for seed in range(1200))
    # The expected counts are 400 with a deviation of 16, and 200 with one of 13; the bounds are five deviations.
    assert all(abs(counts[str(number)] - 400) < 80 and abs(first[str(number)] - 200) < 65 for number in range(6))


def test_sources_are_mixed_under_their_names(tmp_path: Path) -> None:
    left, right, out = plain(tmp_path / "l.jsonl", 8), plain(tmp_path / "r.jsonl", 3, "r"), tmp_path / "out.jsonl"
    sources = [MixSource(name="left", paths=(left,), count=4), MixSource(name="right", paths=(right,), count=9)]
    figures = convert(sources, out)
    assert ids(out) == [f"left/q{n}" for n in range(4)] + [f"right/r{n}" for n in range(3)]
    assert [source["kept"] for source in figures["sources"]] == [4, 3] and figures["sources"][1]["asked"] == 9
    assert Counter(question.metadata["dataset"] for question in read_questions(out)) == {"left": 4, "right": 3}
    convert(sources, out, seed=0)
    mixed = ids(out)
    assert sorted(name.partition("/")[0] for name in mixed) == ["left"] * 4 + ["right"] * 3
    assert mixed != sorted(mixed)
    convert(sources[:1], out, seed=0)
    assert sorted(ids(out)) == sorted(name for name in mixed if name.startswith("left"))


def test_a_mix_is_spelled_so_and_not_otherwise() -> None:
    assert parse_mix("a=f.json") == MixSource(name="a", paths=(Path("f.json"),))
    assert parse_mix("a=x/f:2.json:30") == MixSource(name="a", paths=(Path("x/f:2.json"),), count=30)
    for text in ("f.json", "=f.json", "a=", "a=f.json:0", "a/b=f.json"):
        with pytest.raises(UserError, match="expected NAME=FILE or NAME=FILE:COUNT"):
            parse_mix(text)


def test_passages_are_pooled_once_each(tmp_path: Path) -> None:
    one, two, three = ("One", "1."), ("Two", "2."), ("One", "another one.")
    path, out = hotpot(tmp_path / "h.jsonl", [one, two], [two, three], [one, two]), tmp_path / "out.jsonl"
    figures = convert([MixSource(paths=(path,))], out, corpus=tmp_path / "c.jsonl")
    corpus = read_corpus(tmp_path / "c.jsonl")
    assert [(passage.title, passage.text) for passage in corpus] == [one, two, three]
    assert (figures["passages in the corpus"], figures["passages"]) == (3, 6)
    assert (figures["with passages"], figures["with gold indices"]) == (3, 3)
    known = {passage.id: passage for passage in corpus}
    assert all(known[passage.id] == passage for question in read_questions(out) for passage in question.passages)


@pytest.mark.parametrize(("count", "kept", "gold"), [(0, [0, 0], None), (1, [1, 1], ()), (2, [2, 1], (2,))])
def test_a_question_keeps_its_first_passages(
    tmp_path: Path, count: int, kept: list[int], gold: tuple[int, ...] | None
) -> None:
    path = hotpot(tmp_path / "h.jsonl", [("One", "1."), ("Two", "2."), ("Four", "4.")], [("Three", "3.")])
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[0]["supporting_facts"] = [["Two", 0], ["Four", 0]]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    out, corpus = tmp_path / "out.jsonl", tmp_path / "c.jsonl"
    words = ["--in", str(path), "--passages", str(count), "--corpus", str(corpus), "--out", str(out)]
    assert cli.run(["data", "convert", *words]) == 0
    found = read_questions(out)
    assert [len(question.passages) for question in found] == kept and found[0].gold_indices == gold
    assert [one.title for one in found[0].passages] == ["One", "Two", "Four"][:count]
    assert ('"passages"' in out.read_text()) == (count > 0) and len(list(read_corpus(corpus))) == 4


def test_an_id_that_stands_for_two_passages_is_given_anew(tmp_path: Path) -> None:
    texts = ["a.", "b.", "a.", "b."]
    records = [
        {"question": f"q {n}?", "answers": ["a"], "ctxs": [{"id": "1", "title": "T", "text": text}]}
        for n, text in enumerate(texts)
    ]
    path, out = write(tmp_path / "d.jsonl", *records), tmp_path / "out.jsonl"
    figures = convert([MixSource(paths=(path,))], out, corpus=tmp_path / "c.jsonl")
    known = {passage.id: passage for passage in read_corpus(tmp_path / "c.jsonl")}
    assert len(known) == 2 and figures["passages given another id"] == 2
    assert [known[question.passages[0].id].text for question in read_questions(out)] == texts


def test_aliases_of_2wiki(tmp_path: Path) -> None:
    record = {"_id": "w", "question": "q?", "answer": "USA", "answer_id": "Q30", "evidences": [], "context": []}
    path = write(tmp_path / "w.jsonl", record, {**record, "_id": "v", "answer_id": None})
    aliases = write(tmp_path / "a.json", {"Q_id": "Q30", "aliases": ["U.S.", "USA"], "demonyms": ["American"]})
    out = tmp_path / "out.jsonl"
    convert([MixSource(paths=(path,))], out, aliases=aliases)
    assert [question.golds for question in read_questions(out)] == [("USA", "U.S.", "American"), ("USA",)]
    for bad in ({"id": "Q1"}, {"Q_id": 3, "aliases": []}, {"Q_id": "Q1", "aliases": [1]}):
        with pytest.raises(UserError, match=r"b\.jsonl.*expected .*Q_id"):
            read_aliases(write(tmp_path / "b.jsonl", bad))
    with pytest.raises(UserError, match="aliases are for 2WikiMultiHopQA"):
        convert([MixSource(paths=(plain(tmp_path / "p.jsonl", 2),))], tmp_path / "new.jsonl", aliases=aliases)
    assert not (tmp_path / "new.jsonl").exists()


def test_what_cannot_be_written_is_refused_before_anything_is(tmp_path: Path) -> None:
    path = plain(tmp_path / "a.jsonl", 2)
    source = MixSource(paths=(path,))
    empty = MixSource(paths=(write(tmp_path / "e.jsonl", {"question": "q?", "answer": ""}),))
    before = sorted(tmp_path.iterdir())
    for sources, out, options, message in (
        ([source], path, {}, "is read or written under another name too"),
        ([source], tmp_path / "o.jsonl", {"skipped": tmp_path / "o.jsonl"}, "is read or written under another name"),
        ([source], tmp_path / "o.json", {}, r"name it \.jsonl"),
        ([source], tmp_path / "none" / "o.jsonl", {}, "does not exist; make it first"),
        ([source], tmp_path / "o.jsonl", {"corpus": tmp_path / "c.jsonl"}, "none of these questions comes with"),
        ([source], tmp_path / "o.jsonl", {"fmt": "squad"}, "unknown format 'squad'"),
        ([empty], tmp_path / "o.jsonl", {}, r"no question is left: no gold answer \(1\)"),
        ([MixSource(name="a", paths=(path,))] * 2, tmp_path / "o.jsonl", {}, "--mix names 'a' twice"),
    ):
        with pytest.raises(UserError, match=message):
            convert(sources, out, **options)
        assert sorted(tmp_path.iterdir()) == before


def test_our_own_files_can_be_mixed_again(tmp_path: Path) -> None:
    path = hotpot(tmp_path / "h.jsonl", [("One", "1."), ("Two", "2.")])
    convert([MixSource(paths=(path,))], tmp_path / "one.jsonl")
    convert([MixSource(paths=(tmp_path / "one.jsonl",))], tmp_path / "two.jsonl", fmt="native")
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()


def test_the_summary_counts(tmp_path: Path) -> None:
    passages = [{"title": "T", "text": "Paris is here."}, {"title": "T", "text": "Paris is here."}]
    path = write(
        tmp_path / "q.jsonl",
        {"question": "Where is it?", "golden_answers": ["Paris", "paris!"], "passages": passages, "gold_indices": [2]},
        {"question": "where  is it?", "golden_answers": ["The", "..."], "passages": passages[:1], "gold_indices": []},
        {"question": "Is it?", "golden_answers": ["no", "w " * 21]},
    )
    figures = summarize(path)
    counts = {name: value for name, value in figures.items() if isinstance(value, int)}
    assert counts == {
        "questions": 3,
        "questions asked before": 1,
        "golds that no answer can match": 2,
        "questions that no answer can match": 1,
        "golds twice": 2,
        "golds of more than 20 words": 1,
        "yes/no questions": 1,
        "passages": 3,
        "passages twice in a question": 1,
        "questions with passages": 2,
        "questions with gold indices": 2,
        "questions with no passage gold": 1,
        "questions with a gold passage among theirs": 1,
        "questions with a gold answer in their passages": 1,
        "distinct passages": 1,
    }
    assert figures["per question"]["passages"] == {"min": 0, "mean": 1.0, "p50": 1, "p95": 2, "max": 2}
    assert figures["per question"]["gold passages"] == spread([0, 1])
    assert figures["words"]["passage"] == spread([3, 3, 3])
    assert summarize(plain(tmp_path / "p.jsonl", 2))["words"]["passage"] is None


def test_given_passages_are_ranked_without_a_model_by_the_kinds_of_questions(tmp_path: Path) -> None:
    right, wrong = {"title": "T", "text": "Paris is here."}, {"title": "T", "text": "Nothing."}
    bridge: dict[str, Any] = {"question": "Where is it?", "answer": "Paris", "type": "bridge", "level": "hard"}
    figures = summarize(
        write(
            tmp_path / "q.jsonl",
            {**bridge, "id": "2hop__1_2", "passages": [wrong, right]},
            {**bridge, "id": "3hop1__1_2", "passages": [wrong] * 5 + [right]},
            {**bridge, "id": "x", "hops": 2, "type": "comparison", "passages": [right]},
            {**bridge, "id": "y", "type": "comparison"},
        )
    )
    second = 1 / math.log2(3)
    assert figures["passages as ranked"] == {
        "recall@5": pytest.approx(2 / 3),
        "ndcg@5": pytest.approx((second + 1) / 3),
    }
    assert figures["kinds"] == {
        "hops 2": {"questions": 2, "recall@5": 1.0, "ndcg@5": pytest.approx((second + 1) / 2)},
        "hops 3": {"questions": 1, "recall@5": 0.0, "ndcg@5": 0.0},
        "level hard": {"questions": 4, "recall@5": pytest.approx(2 / 3), "ndcg@5": pytest.approx((second + 1) / 3)},
        "type bridge": {"questions": 2, "recall@5": 0.5, "ndcg@5": pytest.approx(second / 2)},
        "type comparison": {"questions": 2, "recall@5": 1.0, "ndcg@5": 1.0},
    }
    assert summarize(plain(tmp_path / "p.jsonl", 2))["passages as ranked"] == {}


def test_the_summary_refuses_what_training_would(tmp_path: Path) -> None:
    good = {"question": "q?", "golden_answers": ["a"], "passages": [{"title": "T", "text": "t."}]}
    with pytest.raises(UserError, match=r'q\.jsonl:2: "gold_indices" names passage 2 of 1'):
        summarize(write(tmp_path / "q.jsonl", good, {**good, "gold_indices": [2]}))
    with pytest.raises(UserError, match=r"h\.jsonl: looks like HotpotQA .* with thresher data convert"):
        summarize(hotpot(tmp_path / "h.jsonl", [("One", "1.")]))


def test_an_excerpt_marks_gold_and_has_a_line_for_each_passage() -> None:
    passages = (Passage("1", "A", "word " * 60), Passage("2", "B", "red \x1b[31m\nline"))
    question = Question("x", "q?", tuple("abcdefghij"), {"level": "hard", "facts": [["A", 1]]}, passages, (2,))
    lines = excerpt(question).splitlines()
    assert lines[:2] == ["id        x", "question  q?"]
    assert lines[2:4] == ["golds     a", "          b"] and lines[10] == "          .. and 2 more"
    assert lines[11:14] == ["  level: hard", '  facts: [["A", 1]]', "passages  2, 1 of them gold (*)"]
    assert lines[14].startswith("   1  [1] A: word") and lines[14].endswith("word ..")
    assert lines[15] == "*  2  [2] B: red \x1b[31m line"
    assert excerpt(question, whole=True).count("word") == 60 and ".." not in excerpt(question, whole=True)
