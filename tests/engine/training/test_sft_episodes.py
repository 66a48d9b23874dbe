"""Warm-up transcripts that a script plays: what a rollout of the same turns would hold, with the system's full reward;
what gives none; and that warm-up, training and dev sets stay apart."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from thresher.cli import main as cli
from thresher.common.errors import UserError
from thresher.engine.assemble import read_run_recipe
from thresher.engine.config.recipe import Recipe
from thresher.engine.episode import EpisodeConfig, System
from thresher.engine.evaluation.evaluate import jobs_of
from thresher.engine.protocol.prompts import Renderer
from thresher.engine.protocol.trajectory import Segment, Trajectory, check_trajectory
from thresher.engine.rollout.rollout import Limits, Rollout
from thresher.engine.scoring.score import score
from thresher.engine.systems import load_system
from thresher.engine.training.sft import encode_transcript
from thresher.engine.training.sft_episodes import (
    CUT,
    LIMITS,
    NO_EVIDENCE,
    NOT_RIGHT,
    NOT_STATED,
    ScriptedRollout,
    check_apart,
    episode_records,
    shown_part,
    states,
    transcripts_of,
)
from thresher.policy.tokenizer import Tokenizer, UnencodableText
from thresher.retrieval.indexes.load import Index
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question
from thresher.rewards.reward import Source

TEMPLATE = "<search> or <answer>: {question}\n"
SIZES = Limits(max_turn_tokens=400, max_policy_tokens=2000, max_context=4000, max_num_seqs=64)
GIVEN = (
    Passage("a", "Anna Bell", "Anna Bell has spouse Gil Hart."),
    Passage("b", "", "Nothing <answer> to see."),
    Passage("c", "Gil Hart", "He has mayor Otto Pike."),
)
TRIPLES = [["Anna Bell", "spouse", "Gil Hart"], ["Gil Hart", "mayor", "Otto Pike"]]
SPOUSES = Question("given", "Who is the mayor of Anna Bell's spouse?", ("Otto Pike",), {"evidence": TRIPLES}, GIVEN)


@pytest.fixture
def questions(tiny_index: Index) -> list[Question]:
    """One of two hops, and one that compares, in 2Wiki's two spellings of the key."""
    told = [passage.text.removesuffix(".").replace(" has ", " ").split() for passage in tiny_index.corpus]
    of = {(f"{one} {two}", relation): f"{three} {four}" for one, two, relation, three, four in told}
    spouse = of["Anna Bell", "spouse"]
    mayor = of[spouse, "mayor"]
    two = [["Anna Bell", "spouse", spouse], [spouse, "mayor", mayor]]
    other = [[name, "rival", of[name, "rival"]] for name in ("Mia Noor", "Carl Dorn")]
    return [
        Question("hops", "Who is the mayor of Anna Bell's spouse?", (mayor,), {"evidence": two}),
        Question("same", "Do Mia Noor and Carl Dorn have one rival?", ("no",), {"evidences": [*other, other[0]]}),
    ]


def renderer_of(system: System, tokenizer: Tokenizer, budget: int = 400) -> Renderer:
    shown = 'Doc {number}(Title: "{title}") {text}'
    return Renderer(
        tokenizer=tokenizer, tags=system.tags, k=2, chat=False, max_passage_tokens=budget, passage_format=shown
    )


def scripted(system: System, tokenizer: Tokenizer, index: Index | None, **changes: Any) -> ScriptedRollout:
    renderer = renderer_of(system, tokenizer, changes.pop("budget", 400))
    config = EpisodeConfig(system.template if system.given_passages else TEMPLATE, changes.pop("max_turns", 5))
    return ScriptedRollout(tokenizer, index, system, config, renderer, replace(SIZES, **changes))


@pytest.mark.parametrize(
    ("name", "options"),
    [("search_r1", {}), ("eval_rar", {}), ("eval_rar", {"separate_evaluation": True}), ("autorefine", {})],
    ids=["search_r1", "eval_rar", "separate", "autorefine"],
)
def test_a_played_search_is_what_a_rollout_of_its_turns_holds(
    name: str,
    options: dict[str, Any],
    questions: list[Question],
    tiny_tokenizer: Tokenizer,
    tiny_index: Index,
    tiny_rollout: Callable[..., Rollout],
    script: Callable[..., None],
) -> None:
    system = load_system(name, options)
    rollout = scripted(system, tiny_tokenizer, tiny_index)
    jobs = jobs_of(questions)
    played = rollout.run(jobs, 0.0)
    for question, trajectory, entry in zip(
        questions, played, score(questions, played, system, tiny_tokenizer), strict=True
    ):
        assert check_trajectory(trajectory, tiny_tokenizer, system.tags, SIZES.max_context) == []
        assert (entry.result.reward, trajectory.reason) == (1, "answered")
        assert [search["query"] for search in trajectory.searches] == [
            " ".join(triple[:2]) for triple in next(iter(question.metadata.values()))[:2]
        ]
        (record,) = transcripts_of(rollout.parts[question.id], TEMPLATE, system)
        encoded = encode_transcript(json.loads(json.dumps(record)), tiny_tokenizer, rollout.renderer, "unused")
        assert encoded.ids == trajectory.ids() and encoded.positions == trajectory.policy_positions()
        copied = tiny_tokenizer.decode([encoded.ids[row] for row in encoded.copied])
        assert question.metadata.get("evidence", [["", "", "Mia Noor"]])[0][2] in copied and "rival is" not in copied
    # The decoder, forced to write the same turns, makes the same trajectory.
    texts = {
        job.seed: [tiny_tokenizer.decode(s.ids) for s in trajectory.segments if s.source is Source.POLICY]
        for job, trajectory in zip(jobs, played, strict=True)
    }
    script(texts)
    sizes = {key: getattr(SIZES, key) for key in ("max_turn_tokens", "max_policy_tokens", "max_context")}
    decoded = tiny_rollout(system, max_turns=5, max_passage_tokens=400, **sizes).run(jobs, 1.0)
    for ours, theirs in zip(played, decoded, strict=True):
        assert bare(ours) == bare(theirs)


def bare(trajectory: Trajectory) -> Trajectory:
    """The trajectory without the log-probs, which a script does not have."""
    return replace(trajectory, segments=[Segment(s.source, s.ids, [], s.stop, s.trailing) for s in trajectory.segments])


@pytest.mark.parametrize(
    ("name", "note", "separate"),
    [("search_r1", "", False), ("eval_rar", "evaluate", False), ("eval_rar", "evaluate", True)],
)
def test_the_turn_after_a_search_says_what_was_found(
    name: str, note: str, separate: bool, questions: list[Question], tiny_tokenizer: Tokenizer, tiny_index: Index
) -> None:
    system = load_system(name, {"separate_evaluation": True} if separate else {})
    rollout = scripted(system, tiny_tokenizer, tiny_index)
    rollout.run(jobs_of(questions), 0.0)
    said = [each["text"] for each in rollout.parts["hops"].segments if each["source"] == "policy"]
    (one, _, spouse), (_, _, mayor) = questions[0].metadata["evidence"]
    found, last = f" {one}: spouse is {spouse}.", f" {spouse}: mayor is {mayor}."
    need = f" I need the mayor of {spouse}. </think>\n<search> {spouse} mayor </search>"
    ends = f"<think>{found}{last} </think>\n<answer> {mayor} </answer>"
    first = f"<think> I need the spouse of {one}. </think>\n<search> {one} spouse </search>"
    if not note:
        assert said == [first, f"<think>{found}{need}", ends]
    elif separate:
        notes = [f"<{note}>{text} </{note}>" for text in (found, last)]
        assert said == [first, notes[0], f"<think>{need}", notes[1], ends]
    else:
        assert said == [
            first,
            f"<{note}>{found} </{note}>\n<think>{need}",
            f"<{note}>{last} </{note}>\n{ends}",
        ]


@pytest.mark.parametrize("name", ["eviomni", "lear"])
def test_evidence_is_played_with_its_branches(name: str, tiny_tokenizer: Tokenizer) -> None:
    system = load_system(name, {})
    rollout = scripted(system, tiny_tokenizer, None)
    (trajectory,) = rollout.run(jobs_of([SPOUSES]), 0.0)
    (entry,) = score([SPOUSES], [trajectory], system, tiny_tokenizer)
    parts = entry.result.parts
    assert [parts[f"answer_{one}"] for one in ("rationale", "evidence", "full")] == [1, 1, 1]
    assert parts["format"] == 1 and trajectory.reason == "answered"
    whole, *branches = transcripts_of(rollout.parts["given"], system.template, system)
    assert "".join(each["text"] for each in whole["segments"]) == (
        "<reason> [1] Anna Bell: spouse is Gil Hart. [2] nothing of use. [3] Gil Hart: mayor is Otto Pike. </reason>\n"
        "<extract> Anna Bell: spouse is Gil Hart. Gil Hart: mayor is Otto Pike. </extract>\n"
        "<answer> Otto Pike </answer>"
    )
    encoded = [encode_transcript(each, tiny_tokenizer, rollout.renderer, "unused") for each in (whole, *branches)]
    contexts = [trajectory, trajectory.branches["rationale"], trajectory.branches["evidence"]]
    for found, context in zip(encoded, contexts, strict=True):
        assert check_trajectory(context, tiny_tokenizer, system.tags, SIZES.max_context) == []
        assert found.ids == context.ids() and found.positions == context.policy_positions()
    assert GIVEN[0].text not in tiny_tokenizer.decode(encoded[2].ids)


def test_evidence_that_no_passage_states_ends_the_episode(tiny_tokenizer: Tokenizer) -> None:
    rollout = scripted(load_system("eviomni", {}), tiny_tokenizer, None)
    (trajectory,) = rollout.run(jobs_of([changed(SPOUSES, TRIPLES[0], ["Gil Hart", "mayor", "Nobody"])]), 0.0)
    assert rollout.parts["given"].script.problem == NOT_STATED
    assert trajectory.branches == {} and len(trajectory.segments) == 2 and trajectory.segments[1].ids == []


def test_of_a_passage_that_is_cut_what_is_left_counts(tiny_tokenizer: Tokenizer) -> None:
    system = load_system("search_r1", {})
    long = replace(GIVEN[2], text="He has <think> a mayor, Otto Pike, and a rival.")
    whole = renderer_of(system, tiny_tokenizer, 4000)
    first, all_ = len(whole.passages(GIVEN[:1])), len(whole.passages([GIVEN[0], long]))
    seen = []
    for budget in range(first, all_ + 1):
        renderer = renderer_of(system, tiny_tokenizer, budget)
        text, passages = shown_part([GIVEN[0], long], renderer)
        assert text == tiny_tokenizer.decode(whole.passages([GIVEN[0], long])[:budget])
        assert passages[0] == GIVEN[0] and (len(passages) == 1 or text.endswith(passages[1].text) or budget == all_)
        seen.append([states(passage, ("Gil Hart", "mayor", "Otto Pike")) for passage in passages[1:]])
    assert seen[0] == [] and seen[-1] == [True] and [False] in seen and seen == sorted(seen)


def changed(asked: Question, *triples: list[str], **more: Any) -> Question:
    return replace(asked, metadata={"evidence": list(triples)}, **more)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("unknown", NOT_STATED),
        ("cut", CUT),
        ("turns", LIMITS["turns"]),
        ("turn_tokens", LIMITS["turn_tokens"]),
        ("tokens", LIMITS["tokens"]),
        ("context", LIMITS["context"]),
        ("bare", NO_EVIDENCE),
        ("nothing", NOT_RIGHT),
    ],
)
def test_what_gives_no_transcript_is_returned_with_its_reason(
    case: str, reason: str, questions: list[Question], recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    hops, settings = questions[0], {}
    first, second = hops.metadata["evidence"]
    if case == "unknown":
        hops = changed(hops, first, [second[0], "mayor", "Nobody"])
    elif case == "bare":
        hops = changed(hops)
    elif case == "nothing":
        hops = replace(hops, golds=("The",))
    else:
        settings = {
            "cut": {"max_passage_tokens": 12},
            "turns": {"max_turns": 2},
            "turn_tokens": {"max_turn_tokens": 10},
            "tokens": {"max_policy_tokens": 80},
            "context": {"max_context": 260},
        }[case]
    path = write(tmp_path / "q.jsonl", hops, questions[1] if case in ("unknown", "bare") else hops)
    records, unused, total = episode_records(recipe(**settings), path)
    assert [(each.id, each.reason) for each in unused] == [("hops", reason)]
    assert [record["id"] for record in records] == ["same"] * (total == 2)


def write(path: Path, *questions: Question) -> Path:
    """Each question once."""
    lines = {
        question.id: {
            "id": question.id,
            "question": question.question,
            "golden_answers": question.golds,
            **question.metadata,
        }
        for question in questions
    }
    path.write_text("".join(json.dumps(line) + "\n" for line in lines.values()))
    return path


@pytest.fixture
def recipe(tiny_tokenizer: Tokenizer, tiny_index_folder: Path, tmp_path: Path) -> Callable[..., Recipe]:
    """A recipe whose file is recipe.toml, with settings of its rollout."""
    tiny_tokenizer.save(tmp_path / "model")
    (tmp_path / "template.txt").write_text(TEMPLATE)
    (tmp_path / "recipe.toml").write_text(
        f'[model]\npath = "{tmp_path}/model"\n[system]\nname = "eval_rar"\ntemplate = "{tmp_path}/template.txt"\n'
        f'[retrieval]\nindex = "{tiny_index_folder}"\nk = 2\n[rollout]\nmax_turn_tokens = 400\n'
        "max_policy_tokens = 2000\nmax_context = 4000\nmax_passage_tokens = 400\n"
    )

    def read(**settings: int) -> Recipe:
        changes = [f"rollout.{key}={value}" for key, value in settings.items()]
        return read_run_recipe(tmp_path / "recipe.toml", changes)

    return read


def test_the_command_says_how_many_questions_gave_transcripts(
    questions: list[Question], recipe: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe()
    lost = changed(questions[0], ["Nobody", "spouse", "Nobody"], id="lost", question="Who is Nobody's spouse?")
    path, out = write(tmp_path / "q.jsonl", *questions, lost), tmp_path / "w.jsonl"
    command = ["data", "sft", "--kind", "episode", "--recipe", str(tmp_path / "recipe.toml"), "--questions", str(path)]
    assert cli.run([*command, "--out", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["questions"], said["records"], said["unused"]) == (3, 2, 1)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["metadata"] for record in records] == [{"kind": "episode", "system": "eval_rar"}] * 2
    (unused,) = (tmp_path / "w.jsonl.unused.jsonl").read_text().splitlines()
    assert json.loads(unused) == {"id": "lost", "reason": NOT_STATED}
    path.write_text(path.read_text().splitlines()[-1])
    with pytest.raises(UserError, match=r"q.jsonl: no question gives a record of the kind episode \(the first, lost"):
        cli.run_command([*command, "--out", f"{out}2"])
    with pytest.raises(UserError, match="--kind episode has no script for the system r1; it has search_r1, eval_rar"):
        cli.run_command([*command, "--set", "system.name=r1", "--out", f"{out}2"])
    with pytest.raises(UserError, match="--template and --answer are not for episode records"):
        cli.run_command([*command, "--answer", "plain", "--out", f"{out}2"])
    for words in (["episode"], ["qa", "--recipe", "r.toml"], ["qa", "--set", "a.b=1"]):
        with pytest.raises(UserError, match="--recipe and its --set are for --kind episode, which needs --recipe"):
            cli.run_command(["data", "sft", "--kind", *words, "--questions", str(path), "--out", f"{out}2"])


def test_warm_up_training_and_dev_sets_have_no_question_in_common(
    questions: list[Question], recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    recipe()
    hops, same = questions
    shouted = replace(hops, id="other", question=hops.question.upper().replace("?", " ?"))
    free = [replace(same, id=f"free {n}", question=f"Question {n}?") for n in range(2)]
    train, dev = tmp_path / "train.jsonl", tmp_path / "dev.jsonl"
    settings = [f"data.train={train}", f"data.dev={dev}"]
    for ours, theirs, others, wrong in (
        (hops, free[0], free[1], ""),
        (hops, hops, free[1], f"{train}: question hops is in warmup.jsonl too; "),
        (hops, free[0], shouted, f"{dev}: question other is in warmup.jsonl too; "),
        (hops, free[0], free[0], f"{dev}: question free 0 is in {train} too; "),
    ):
        write(train, theirs), write(dev, others)
        read = read_run_recipe(tmp_path / "recipe.toml", settings)
        if not wrong:
            check_apart([ours], "warmup.jsonl", read)
            continue
        with pytest.raises(UserError, match=wrong):
            check_apart([ours], "warmup.jsonl", read)
    with pytest.raises(UserError, match=f"{dev}: question free 0 is in {dev} too; "):
        check_apart(
            [free[0]], dev, read_run_recipe(tmp_path / "recipe.toml", [f"data.train={write(train, hops)}", settings[1]])
        )


@pytest.mark.parametrize("evidence", ["Anna", [["Anna", "spouse"]], [["Anna", "spouse", 3]], ["abc"]])
def test_evidence_of_another_form_is_refused(
    evidence: Any, questions: list[Question], recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    path = write(tmp_path / "q.jsonl", replace(questions[0], metadata={"evidence": evidence}))
    with pytest.raises(UserError, match=r"question hops: .* expected a list of triples \[subject, relation, object\]"):
        episode_records(recipe(), path)


def test_an_answer_that_the_tokenizer_cannot_encode_names_its_question(
    tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = Tokenizer.encode

    def lacking(self: Tokenizer, text: str) -> list[int]:
        if "<reason>" in text:
            raise UnencodableText("has U+0000")
        return encode(self, text)

    rollout = scripted(load_system("eviomni", {}), tiny_tokenizer, None)
    monkeypatch.setattr(Tokenizer, "encode", lacking)
    with pytest.raises(UserError, match=r"question given, its evidence or answer: has U\+0000"):
        rollout.run(jobs_of([SPOUSES]), 0.0)


@pytest.mark.parametrize(
    ("title", "text", "stated"),
    [
        ("Anna Bell (singer)", "She married Gil Hart.", True),
        ("", "Anna Bell married Gil Hart.", True),
        ("Anna Bell", "She married Gil Harter.", False),
        ("Anna Bell, Gil Hart", "They married.", False),
        ("Anna", "She married Gil Hart.", False),
    ],
)
def test_a_passage_states_a_triple(title: str, text: str, stated: bool) -> None:
    assert states(Passage("p", title, text), ("Anna Bell", "spouse", "Gil Hart")) == stated


def test_most_of_2wikis_questions_can_be_played(
    shared_data: Path, recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    """By BM25, as recipes/smollm2/search.toml says."""
    corpus, out = shared_data / "2wiki" / "corpus.json", tmp_path / "indexes"
    cli.run_command(
        ["index", "build", "--corpus", str(corpus), "--encoder", "bm25", "--embed", "title+text", "--out", str(out)]
    )
    recipe()
    settings = [f"retrieval.index={out}", "retrieval.k=3", "rollout.max_passage_tokens=4000", "rollout.max_turns=5"]
    settings += ["rollout.max_context=20000", "rollout.max_policy_tokens=9000", "rollout.max_turn_tokens=2000"]
    read = read_run_recipe(tmp_path / "recipe.toml", settings)
    path = shared_data / "2wiki" / "questions_1000.json"
    first = json.loads(path.read_text("utf-8"))[:60]
    (tmp_path / "q.json").write_text(json.dumps(first))
    records, unused, total = episode_records(read, tmp_path / "q.json")
    assert total == 60 == len(records) + len(unused) and len(records) > 40
