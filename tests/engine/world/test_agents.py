"""The search agents' world: a function of its seed, nested corpora, and questions that trusted documents answer."""

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from thresher.cli.main import run
from thresher.engine.assemble import read_run_recipe
from thresher.engine.world.agents import UNKNOWN, AgentWorld, invent_agents
from thresher.engine.world.facts import RELATIONS, Size

SIZE = Size(people=60, places=40, works=60, pieces=40, train_questions=60, test_questions=40, warmup_worlds=2)
SETTINGS = AgentWorld(size=SIZE, unanswerable=20, recitals=24, hearsay=0.5)
COVERAGES = (0.5, 0.7, 1.0)
FILES = ("train", "test", "unanswerable", "warmup", "recitals")
FACT = re.compile(r"(\w+ \w+) (has|may have) (\w+) (\w+ \w+)\.")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[float, Path]:
    """Make the world of seed 7 at each coverage."""
    folder = tmp_path_factory.mktemp("agents")
    for coverage in COVERAGES:
        invent_agents(folder / str(coverage), 7, coverage, " {text}", SETTINGS)
    return {coverage: folder / str(coverage) for coverage in COVERAGES}


def facts_of(world: Path) -> dict[bool, dict[tuple[str, str], str]]:
    """Return the facts of the documents, (subject, relation) -> object, by whether they are hearsay."""
    found: dict[bool, dict[tuple[str, str], str]] = {False: {}, True: {}}
    for document in read(world / "corpus.jsonl"):
        for subject, verb, relation, object_ in FACT.findall(document["text"]):
            found[verb == "may have"][subject, relation] = object_
    return found


def answer(question: str, know: Callable[[tuple[str, str]], str | None]) -> str:
    """Return the answer of an agent that looks up one relation after the other."""
    entity, *relations = question.removeprefix("What is ").removesuffix("?").split("'s ")
    for relation in relations:
        found = know((entity, relation))
        if found is None:
            return UNKNOWN
        entity = found
    return entity


def share_right(world: Path, name: str, know: Callable[[tuple[str, str]], str | None]) -> float:
    asked = read(world / f"{name}.jsonl")
    return sum(answer(one["question"], know) in one["golden_answers"] for one in asked) / len(asked)


@pytest.mark.slow
def test_it_is_a_function_of_its_seed(worlds: dict[float, Path], tmp_path: Path) -> None:
    for seed, same in ((7, True), (8, False)):
        invent_agents(tmp_path / str(seed), seed, 1.0, " {text}", SETTINGS)
        for name in (*FILES, "corpus"):
            files = [folder / f"{name}.jsonl" for folder in (tmp_path / str(seed), worlds[1.0])]
            assert (files[0].read_bytes() == files[1].read_bytes()) == same


def test_the_corpus_of_a_lower_coverage_is_a_part_of_a_higher_ones(worlds: dict[float, Path]) -> None:
    counts = []
    for lower, higher in itertools.pairwise(COVERAGES):
        for name in FILES:
            assert (worlds[lower] / f"{name}.jsonl").read_bytes() == (worlds[higher] / f"{name}.jsonl").read_bytes()
        few, many = (facts_of(worlds[coverage]) for coverage in (lower, higher))
        assert few[True] == many[True] and few[False].items() < many[False].items()
        counts += [len(few[False]), len(many[False])]
    # A tenth is never stated; of n facts a share c has a standard deviation of at most half the root of n.
    facts = sum(SIZE.entities.values()) * 3
    for coverage, count in zip((0.5, 0.7, 1.0), dict.fromkeys(counts), strict=True):
        assert abs(count - 0.9 * coverage * facts) < 5 * 0.5 * facts**0.5


def test_a_document_has_sentences_of_its_entity_and_hearsay_is_never_true(worlds: dict[float, Path]) -> None:
    told = facts_of(worlds[1.0])
    both = told[True].keys() & told[False].keys()
    assert both and all(told[True][key] != told[False][key] for key in both)
    lengths = [len(FACT.findall(one["text"])) for one in read(worlds[1.0] / "corpus.jsonl")]
    assert max(lengths) >= 4 and sum(lengths) / len(lengths) > 2
    for one in read(worlds[1.0] / "corpus.jsonl"):
        entity, _, kind = one["title"].partition(", ")
        assert entity in one["text"] or kind == "elsewhere"
        assert (" may have " in one["text"]) == (kind == "hearsay")


@pytest.mark.parametrize("coverage", COVERAGES)
def test_who_trusts_the_articles_is_right_and_who_trusts_hearsay_is_not(
    worlds: dict[float, Path], coverage: float
) -> None:
    told = facts_of(worlds[coverage])
    assert share_right(worlds[coverage], "test", told[False].get) == 1.0
    # Half of the facts are contradicted, so at most a quarter of the paths of two facts has no hearsay: 40 questions
    # with that chance exceed .6 once in 10^6.
    assert share_right(worlds[coverage], "test", (told[False] | told[True]).get) < 0.6


def test_what_has_no_answer_has_none_at_any_coverage(worlds: dict[float, Path]) -> None:
    for world in worlds.values():
        asked = read(world / "unanswerable.jsonl")
        assert asked and all(one["golden_answers"] == [UNKNOWN] for one in asked)
        assert share_right(world, "unanswerable", facts_of(world)[False].get) == 1.0


def test_more_training_questions_have_an_answer_where_more_is_covered(worlds: dict[float, Path]) -> None:
    right = [share_right(world, "train", facts_of(world)[False].get) for world in worlds.values()]
    assert right == sorted(right) and right[0] < right[-1] < 1


def test_held_out_entities_are_in_no_training_question_and_no_warm_up(worlds: dict[float, Path]) -> None:
    world = worlds[1.0]
    held_out = {one["question"].removeprefix("What is ").split("'s ")[0] for one in read(world / "test.jsonl")}
    held_out |= {one["golden_answers"][0] for one in read(world / "test.jsonl")}
    assert len(held_out) > 20
    for name in ("train", "warmup", "recitals"):
        text = (world / f"{name}.jsonl").read_text("utf-8")
        assert not [entity for entity in held_out if entity in text]


def test_hops_and_the_budget_of_searches(worlds: dict[float, Path]) -> None:
    for name in ("train", "test"):
        hops = [one["metadata"]["hops"] for one in read(worlds[1.0] / f"{name}.jsonl")]
        assert {count: hops.count(count) / len(hops) for count in (2, 3, 4)} == {2: 0.4, 3: 0.4, 4: 0.2}
    recipe = read_run_recipe("world/agents.toml", [])
    assert recipe.rollout.max_turns - 1 == max(hops for hops, _ in SETTINGS.hops) + 1


def test_transcripts_that_follow_their_question_read_its_answer(tmp_path: Path) -> None:
    """Without hearsay and with every fact stated, a transcript answers with what it read, if its searches found all."""
    settings = AgentWorld(
        size=Size(people=60, places=40, works=60, pieces=40, warmup_worlds=2, transcripts=40, aware=1.0),
        missing=0.0,
        hearsay=0.0,
        recitals=2,
    )
    invent_agents(tmp_path / "world", 3, 1.0, " {text}", settings)
    found = 0
    for one in read(tmp_path / "world" / "warmup.jsonl"):
        text = "".join(segment["text"] for segment in one["segments"] if segment["source"] == "policy")
        read_here = {(s, r): o for s, _, r, o in FACT.findall(text)}
        said = re.search(r"<answer> (.*) </answer>", text)
        assert said is not None and said[1] in (answer(one["question"], read_here.get), UNKNOWN)
        found += said[1] != UNKNOWN
    assert found > 20


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--coverage .6", "--coverage is for --agents"),
        ("--agents --coverage .2", "--coverage 0.2: expected a number from 0.5 to 1"),
        ("--agents --forms 3", "--agents writes files of its own; leave --forms and --articles out"),
        ("--agents --articles", "--agents writes files of its own"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    words: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["data", "invent", *words.split(), "--out", str(tmp_path / "world")]) == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "world").exists()


def test_transcripts_that_do_not_follow_their_question_take_an_entitys_first_relation(tmp_path: Path) -> None:
    settings = AgentWorld(
        size=Size(people=60, places=40, works=60, pieces=40, warmup_worlds=2, transcripts=40, aware=0.0), recitals=2
    )
    invent_agents(tmp_path / "world", 3, 1.0, " {text}", settings)
    text = (tmp_path / "world" / "warmup.jsonl").read_text("utf-8")
    searched = re.findall(r"<search> (\w+) of ", text)
    assert len(searched) > 40 and set(searched) <= {relations[0] for relations in map(list, RELATIONS.values())}


def test_a_recital_answers_with_the_object_told_last(worlds: dict[float, Path]) -> None:
    for one in read(worlds[1.0] / "recitals.jsonl"):
        told, answered = one["segments"][-1]["text"].removesuffix(" </answer>").split("</think><answer> ")
        last = FACT.findall(told)[-1]
        assert told.endswith(f". The {last[2]}? ") if answered == last[3] else answered == UNKNOWN and "has no" in told
