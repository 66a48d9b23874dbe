"""The stages of ARENA's base: a number that is trained is that of the fact asked for, and the last stage is ARENA's
protocol as its reward reads it."""

import random
import re
from pathlib import Path

import pytest

from thresher.cli.main import build_parser
from thresher.engine.world.facts import RELATIONS, Size, invent
from thresher.engine.world.files import STAGES, drawn_facts, invent_files, number_transcripts, numbered_transcripts
from thresher.engine.world.stages import base_folder, world_stages
from thresher.rewards.papers.arena import parse_indices

SMALL = Size(people=24, places=16, works=20, pieces=14, warmup_worlds=2)
WORLDS = invent(SMALL, 5)


@pytest.mark.parametrize("stage", STAGES)
def test_the_numbers_are_those_of_the_facts_asked_for(stage: str) -> None:
    records = number_transcripts(WORLDS.warmup, stage, 80, SMALL, 0)
    assert records == number_transcripts(WORLDS.warmup, stage, 80, SMALL, 0) and len(records) == 80
    assert all(record["segments"][0]["text"].startswith("naive_grpo") for record in records[1::2])
    lengths = set()
    for record in records[::2]:
        _, listed, _, *asked = record["segments"]
        # What stands before a number, up to the line's number: a relation, and its subject where titles are shown.
        titles = {number: words for words, number in re.findall(r"^ (?:(.+?))([1-6])(?: .*)?$", listed["text"], re.M)}
        numbers = {word: number for number, words in titles.items() for word in (words, words.rpartition(", ")[2])}
        words = ""
        for segment in asked:
            if segment["source"] == "prompt":
                words = words + segment["text"] if segment["text"] == ", " else segment["text"]
                continue
            said = words.strip(" [\n]").removesuffix("<relevance>").strip().removesuffix("?")
            *outer, inner = said.removeprefix("What is the ").split(" of ")
            title = titles[segment["text"]]
            if not outer:  # the relation alone
                assert numbers[inner] == segment["text"]
            elif ", " not in words:  # the first number: the fact about what is named
                assert title == f"{inner}, {outer[-1].removeprefix('the ')}"
                first = re.search(rf"{title}{segment['text']} .* has .*? (\w+ \w+)\.$", listed["text"], re.M)
            else:
                assert first is not None and title == f"{first[1]}, {outer[0]}"
            lengths.add(len(outer))
    assert lengths == ({0} if stage != "numbers-4" else {0, 1, 2})


def test_the_last_stage_names_the_facts_in_the_order_of_their_use() -> None:
    records = numbered_transcripts(WORLDS.warmup, 120, SMALL)
    arena = [record for record in records if record["id"].startswith("arena-")]
    assert len(arena) == 80 and len(records) == 120
    for record in arena:
        passages, text = record["segments"][1]["text"].split("\n"), record["segments"][-1]["text"]
        named = re.findall("[0-9]", text.partition("</relevance>")[0])
        used = re.findall(r"\w+ \w+ has \w+ \w+ \w+\.", text)
        assert parse_indices(text.partition("</relevance>")[0].removeprefix("<relevance>")) == set(map(int, named))
        assert all(passages[int(n) - 1].endswith(f"{n} {fact}") for n, fact in zip(named, used, strict=False)) and used


def test_a_stage_reads_what_the_one_before_wrote(tmp_path: Path) -> None:
    invent_files(tmp_path / "data", 5, SMALL, " {text}", forms=4)
    shared, stages = world_stages(tmp_path, 1), world_stages(tmp_path, 1, base="numbered")
    assert stages[: len(shared)] == shared  # the shared base's commands, unchanged
    model = f"{tmp_path}/base1"
    for words in stages[len(shared) :]:
        options = build_parser().parse_args(words)
        if words[0] == "init":
            read = options.model
        else:
            given = dict(text.split("=", 1) for text in options.set)
            read = given["model.path"]
            assert Path(given["sft.transcripts"]).stat().st_size and given["run.seed"] == "1"
        assert read == model
        model = options.out
    assert model == base_folder(tmp_path, "numbered", 1)


def test_facts_drawn_distinct_repeat_no_relation() -> None:
    rng = random.Random(0)
    names = sorted(WORLDS.warmup[0].kinds)
    for distinct in (True, False):
        drawn = [drawn_facts(rng, names, distinct)[0] for _ in range(20)]
        assert all(len({fact.relation for fact in facts}) == 6 for facts in drawn) == distinct
    assert len(RELATIONS) == 3
