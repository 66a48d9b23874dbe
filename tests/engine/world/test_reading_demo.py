"""Test the demo of a pretrained model: its articles, its split of a user's questions, its output, and its resumption.
The model here is tiny and untaught."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from thresher.cli import main as cli
from thresher.common.errors import UserError
from thresher.common.machine import cpu_dtype
from thresher.engine.config.recipe import load_recipe
from thresher.engine.world import before_after
from thresher.engine.world.articles import ARTICLES, ASKED, SENTENCES, articles, invent_articles
from thresher.engine.world.before_after import TRANSCRIPTS, split_questions
from thresher.engine.world.facts import RELATIONS, Size, invent
from thresher.retrieval.questions import Question, question_record, read_questions

COUNTS = {"people": 40, "places": 40, "works": 40, "pieces": 20, "two_hop": 0.4}
SMALL = Size(**COUNTS, train_questions=60, test_questions=20, dev_questions=20)
# The tiny model's context has room for passages of any length.
SHORT = (
    *("run.steps=2", "run.eval_every=1", "run.save_every=1", "run.eval_questions=7", "rollout.questions_per_step=2"),
    *("rollout.group_size=2", "rollout.max_turn_tokens=4", "rollout.max_policy_tokens=4", "model.prompt=raw"),
    *("rollout.max_context=1600", "rollout.max_passage_tokens=1400"),
)


@pytest.fixture(scope="module")
def files(once: Callable[..., Path]) -> Path:
    return once("articles", lambda folder: invent_articles(folder / "data", 5, SMALL)) / "data"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the demo small."""
    monkeypatch.setattr(invent_articles, "__defaults__", (SMALL,))
    monkeypatch.setattr(before_after, "HELD_OUT", 9)
    monkeypatch.setattr(before_after, "TO_TRAIN", 6)


def facts_told(passage: str) -> list[tuple[str, str, str]]:
    """Return (subject, relation, object) of every sentence of an article, read only from its words."""
    name = r"(?:The )?[A-Z][a-z]+ [A-Z][a-z]+"
    opening = re.match(rf"({name}) is a (\w+)\. ", passage)
    assert opening
    subject, noun = opening.groups()
    found = []
    for sentence in re.findall(r"[^.]+\.", passage[opening.end() :]):
        mention = f"(?:{subject}|[Tt]he {noun})"
        matches = [
            (subject, relation, match[1])
            for relation, wordings in SENTENCES.items()
            for wording in wordings
            if (match := re.fullmatch(wording.format(s=mention, o=f"({name})"), sentence.strip()))
        ]
        assert len(matches) == 1, sentence
        found += matches
    return found


def answers(asked: str, told: set[tuple[str, str, str]]) -> set[str]:
    """Return all answers to a question that the facts allow, found only from its words."""
    for relation, (question, _) in ASKED.items():
        if match := re.fullmatch(re.escape(question).replace(r"\{s\}", "(.+)"), asked):
            return {object_ for name in named(match[1], told) for s, r, object_ in told if (s, r) == (name, relation)}
    raise AssertionError(asked)


def named(words: str, told: set[tuple[str, str, str]]) -> set[str]:
    """Return the entities that a subject's words denote."""
    for relation, (_, phrase) in ASKED.items():
        if match := re.fullmatch(re.escape(phrase).replace(r"\{s\}", "(.+)"), words):
            return {object_ for s, r, object_ in told if (s, r) == (match[1], relation)}
    return {words}


def test_every_question_has_one_answer_and_needs_its_gold_passages(files: Path) -> None:
    for split in ("train", "dev", "test"):
        for question in read_questions(files / f"{split}.jsonl"):
            texts = [passage.text for passage in question.passages]
            assert len(set(texts)) == ARTICLES and question.gold_indices is not None
            told = {fact for text in texts for fact in facts_told(text)}
            assert answers(question.question, told) == set(question.golds)
            assert len(question.gold_indices) == question.metadata["hops"]
            for number in question.gold_indices:
                without = {fact for n, text in enumerate(texts, 1) if n != number for fact in facts_told(text)}
                assert not answers(question.question, without)


def test_an_article_tells_all_facts_of_its_entity_and_names_it_once_a_sentence() -> None:
    world = invent(SMALL, 2).train
    for name, article in articles(world, 2).items():
        expected = {(name, relation, world.facts[name, relation].object) for relation in RELATIONS[world.kinds[name]]}
        assert set(facts_told(article.text)) == expected
        assert all(sentence.count(name) <= 1 for sentence in article.text.split("."))


def test_held_out_questions_share_no_entity_with_training_and_no_question_with_each_other(files: Path) -> None:
    train, dev, test = (read_questions(files / f"{split}.jsonl") for split in ("train", "dev", "test"))

    def entities(questions: list[Question]) -> set[str]:
        return {passage.title for question in questions for passage in question.passages}

    assert [len(train), len(dev), len(test)] == [60, 20, 20]
    assert not entities(train) & entities([*dev, *test])
    asked = [question.question for question in (*train, *dev, *test)]
    assert len(set(asked)) == len(asked)
    hops = [question.metadata["hops"] for question in train]
    assert hops.count(2) == round(0.4 * len(train))


def test_the_files_are_a_function_of_the_seed(files: Path, tmp_path: Path) -> None:
    invent_articles(tmp_path / "again", 5, SMALL)
    invent_articles(tmp_path / "other", 6, SMALL)
    for name in ("train.jsonl", "dev.jsonl", "test.jsonl"):
        text = (files / name).read_text()
        assert text == (tmp_path / "again" / name).read_text() != (tmp_path / "other" / name).read_text()


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.run(list(words)) == 2
    return capsys.readouterr().err


def test_articles_and_questions_without_their_flag_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = ("--out", str(tmp_path / "out"))
    said = refused(capsys, "data", "invent", "--articles", "--forms", "32", *out)
    assert said == "thresher: --articles writes no warm-up transcripts; leave --forms and --aware out\n"
    assert "name its folder with --model" in refused(capsys, "demo", "--questions", "nq.jsonl", *out)
    assert str(tmp_path / "none") in refused(capsys, "demo", "--model", str(tmp_path / "none"), *out)
    assert not (tmp_path / "out").exists()


def write(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.usefixtures("small")
def test_a_file_of_questions_is_split_at_random(
    files: Path, tiny_model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [question_record(question) for question in read_questions(files / "train.jsonl")]
    path = write(tmp_path / "given.jsonl", [*given, {**given[0], "id": "again"}])
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        split_questions(path, tmp_path / name, seed)
    a, b, c = ((tmp_path / name / "test.jsonl").read_text() for name in "abc")
    assert a == b != c
    train, test = (read_questions(tmp_path / "a" / f"{split}.jsonl") for split in ("train", "test"))
    assert len(test) == 9 and not {q.question for q in train} & {q.question for q in test}
    assert len(train) in (51, 52)  # without a question that is asked in the test
    with pytest.raises(UserError, match=r"few\.jsonl: holds 10 questions with 1 to train on .* at least 15 different"):
        split_questions(write(tmp_path / "few.jsonl", given[:10]), tmp_path / "few", 0)
    bare = [{key: value for key, value in record.items() if key != "passages"} for record in given]
    for record in bare:
        record.pop("gold_indices")
    with pytest.raises(UserError, match=r"bare\.jsonl: 60 of 60 questions have no passages"):
        split_questions(write(tmp_path / "bare.jsonl", bare), tmp_path / "bare", 0)
    model = ("--model", str(tiny_model_folder), "--out", str(tmp_path / "demo"))
    assert "few.jsonl: holds 10" in refused(capsys, "demo", *model, "--questions", str(tmp_path / "few.jsonl"))
    assert "none.jsonl: " in refused(capsys, "demo", *model, "--questions", str(tmp_path / "none.jsonl"))
    assert not (tmp_path / "demo").exists()
    assert not (tmp_path / "few").exists() and not (tmp_path / "bare").exists()


def test_the_processor_chooses_the_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    for avx, amx, expected in ((True, False, "bfloat16"), (False, True, "bfloat16"), (False, False, "float32")):
        monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda avx=avx: avx)
        monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda amx=amx: amx)
        assert cpu_dtype() == expected


@pytest.mark.slow
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("given", [False, True])
def test_a_model_learns_from_articles_or_from_given_questions(
    given: bool,
    files: Path,
    tiny_model_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "demo"
    questions = ["--questions", str(files / "train.jsonl")] if given else []
    words = ["demo", "--model", str(tiny_model_folder), *questions, "--out", str(out), "--seed", "3"]
    words += [part for text in SHORT for part in ("--set", text)]
    # Killed after the first step, on another kind of processor.
    with monkeypatch.context() as patch:
        patch.setattr("thresher.engine.world.stages.cpu_dtype", lambda: "float32")
        patch.setattr("thresher.engine.training.train.Trainer._evaluation_due", stop_at_one)
        assert cli.run(words) == 2
    assert "far enough" in capsys.readouterr().err
    monkeypatch.setattr("thresher.engine.world.stages.cpu_dtype", lambda: "bfloat16")
    said = refused(capsys, *words[:-2])
    assert f"was begun with --model {tiny_model_folder}" in said and "give the same, or choose another" in said
    assert cli.run(words) == 0
    shown = capsys.readouterr().out
    assert f"{out / 'grpo'} --resume" in shown.replace("\n", " ")
    assert load_recipe(out / "grpo" / "recipe.toml").model.dtype == "float32"
    for text in (shown, (out / "notes.md").read_text()):
        for name in ("Question", "Read", "Before", "After", "Gold"):
            assert len(re.findall(rf"^{name}: .", text, re.MULTILINE)) == TRANSCRIPTS
    assert all(
        name in shown for name in ("EM before", "F1 after", "1 passage needed", "2 passages needed", "after step")
    )
    assert (out / "report.html").is_file() and json.loads((out / "summary.json").read_text())["questions"] == 7
    assert re.search(r"<br>Before: .*<br>After: .*<br>Gold: ", (out / "report.html").read_text())


def stop_at_one(trainer: Any, step: int, last: bool) -> bool:
    if step == 1:
        raise UserError("far enough")
    return True
