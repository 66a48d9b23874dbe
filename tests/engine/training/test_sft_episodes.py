"""Warm-up transcripts from scripts: they equal a rollout of the same turns and get the system's full reward; questions
that give none; and warm-up, training and dev sets stay apart."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from thresher.cli import main as cli
from thresher.common.errors import UserError
from thresher.engine.assemble import read_run_recipe
from thresher.engine.config.recipe import Recipe
from thresher.engine.episode import EpisodeConfig, System
from thresher.engine.evaluation.evaluate import jobs_of
from thresher.engine.protocol.prompts import Renderer
from thresher.engine.protocol.trajectory import Segment, Trajectory, check_trajectory, contexts, trained_contexts
from thresher.engine.rollout.contexts import branch_seed
from thresher.engine.rollout.rollout import EpisodeRunner, Limits, Rollout
from thresher.engine.scoring.score import score
from thresher.engine.systems import load_system
from thresher.engine.training.sft import encode_all, encode_transcript
from thresher.engine.training.sft_episodes import (
    CUT,
    LIMITS,
    NO_EVIDENCE,
    NOT_RIGHT,
    NOT_STATED,
    SCRIPTS,
    ScriptedWriter,
    as_shown,
    episode_records,
    states,
    transcripts_of,
    why_unusable,
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
    """Return a two-hop question and a comparison, in 2Wiki's two spellings of the key."""
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


def runner_of(system: System, tokenizer: Tokenizer, index: Index | None) -> EpisodeRunner:
    config = EpisodeConfig(system.template if system.given_passages else TEMPLATE, 5)
    return EpisodeRunner(tokenizer, index, system, config, renderer_of(system, tokenizer), SIZES)


def played(runner: EpisodeRunner, questions: list[Question]) -> list[Trajectory]:
    writer = ScriptedWriter(runner.tokenizer, SCRIPTS[runner.system.name], runner.system.tags)
    return runner.play_all(jobs_of(questions), writer, None)


def said(trajectory: Trajectory, tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode(part.ids) for part in trajectory.segments if part.source is Source.POLICY]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("search_r1", {}),
        ("igpo", {}),
        ("eval_rar", {}),
        ("eval_rar", {"separate_evaluation": True}),
        ("autorefine", {}),
        ("mem1", {}),
    ],
    ids=["search_r1", "igpo", "eval_rar", "separate", "autorefine", "mem1"],
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
    runner = runner_of(system, tiny_tokenizer, tiny_index)
    trajectories = played(runner, questions)
    for question, trajectory, entry in zip(
        questions, trajectories, score(questions, trajectories, system, tiny_tokenizer), strict=True
    ):
        assert check_trajectory(trajectory, tiny_tokenizer, system.tags, SIZES.max_context) == []
        assert (entry.result.reward, trajectory.reason, why_unusable(entry, runner)) == (1, "answered", None)
        assert [search["query"] for search in trajectory.searches] == [
            " ".join(triple[:2]) for triple in next(iter(question.metadata.values()))[:2]
        ]
        (record,) = transcripts_of(question, trajectory, tiny_tokenizer, name)
        lines = [("line", json.loads(json.dumps(record)))]
        encoded = encode_all(lines, tiny_tokenizer, runner.renderer, "unused", None)
        trained = trained_contexts(trajectory)
        assert [(one.ids, one.positions) for one in encoded] == [(one.ids, one.positions) for one in trained]
        assert len(trained) == (len(trajectory.searches) + 1 if name == "mem1" else 1)
    # The decoder makes the same trajectory when it is forced to write the same turns.
    jobs = jobs_of(questions)
    texts: dict[int, list[str]] = {}
    for job, one in zip(jobs, trajectories, strict=True):
        seed = job.seed
        for context in contexts(one):
            texts[seed] = said(replace(one, segments=context), tiny_tokenizer)
            seed = branch_seed(seed, "fold")
    script(texts)
    sizes = {key: getattr(SIZES, key) for key in ("max_turn_tokens", "max_policy_tokens", "max_context")}
    decoded = tiny_rollout(system, max_turns=5, max_passage_tokens=400, **sizes).run(jobs, 1.0)
    for ours, theirs in zip(trajectories, decoded, strict=True):
        assert bare(ours) == bare(theirs)


def bare(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory without its log-probs, which a script does not have."""
    segments = [Segment(s.source, s.ids, [], s.stop, s.trailing) for s in trajectory.segments]
    return replace(trajectory, segments=segments, scores=[one | {"logprobs": []} for one in trajectory.scores])


@pytest.mark.parametrize(
    ("name", "note", "separate"),
    [("search_r1", "", False), ("eval_rar", "evaluate", False), ("eval_rar", "evaluate", True)],
)
def test_the_turn_after_a_search_says_what_was_found(
    name: str, note: str, separate: bool, questions: list[Question], tiny_tokenizer: Tokenizer, tiny_index: Index
) -> None:
    system = load_system(name, {"separate_evaluation": True} if separate else {})
    trajectory, _ = played(runner_of(system, tiny_tokenizer, tiny_index), questions)
    written = said(trajectory, tiny_tokenizer)
    (one, _, spouse), (_, _, mayor) = questions[0].metadata["evidence"]
    found, last = f" {one}: spouse is {spouse}.", f" {spouse}: mayor is {mayor}."
    need = f" I need the mayor of {spouse}. </think>\n<search> {spouse} mayor </search>"
    ends = f"<think>{found}{last} </think>\n<answer> {mayor} </answer>"
    first = f"<think> I need the spouse of {one}. </think>\n<search> {one} spouse </search>"
    if not note:
        assert written == [first, f"<think>{found}{need}", ends]
    elif separate:
        notes = [f"<{note}>{text} </{note}>" for text in (found, last)]
        assert written == [first, notes[0], f"<think>{need}", notes[1], ends]
    else:
        assert written == [
            first,
            f"<{note}>{found} </{note}>\n<think>{need}",
            f"<{note}>{last} </{note}>\n{ends}",
        ]


def test_a_turn_of_mem1_says_all_that_was_found() -> None:
    """Its context contains only the last turn, which repeats the earlier facts."""
    triples = [(name, "rival", f"{name}'s rival") for name in ("Anna", "Bea", "Carl", "Dora")]
    trajectory = Trajectory("q", 0, 0, searches=[{"query": triple[0]} for triple in triples[:3]])
    sample = SimpleNamespace(trajectory=trajectory)
    stop, facts = ("</search>", "</answer>"), [f" {subject}: rival is {object_}." for subject, _, object_ in triples]
    need = " I need the rival of Dora. </think>\n<search> Dora rival </search>"
    assert SCRIPTS["mem1"](sample, "x", triples, stop) == f"<think>{''.join(facts[:3])}{need}"  # type: ignore[arg-type]
    assert SCRIPTS["search_r1"](sample, "x", triples, stop) == f"<think>{facts[2]}{need}"  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["eviomni", "lear"])
def test_evidence_is_played_with_its_branches(name: str, tiny_tokenizer: Tokenizer) -> None:
    system = load_system(name, {})
    runner = runner_of(system, tiny_tokenizer, None)
    (trajectory,) = played(runner, [SPOUSES])
    (entry,) = score([SPOUSES], [trajectory], system, tiny_tokenizer)
    parts = entry.result.parts
    assert [parts[f"answer_{one}"] for one in ("rationale", "evidence", "full")] == [1, 1, 1]
    assert parts["format"] == 1 and why_unusable(entry, runner) is None
    assert "".join(said(trajectory, tiny_tokenizer)) == (
        "<reason> [1] Anna Bell: spouse is Gil Hart. [2] nothing of use. [3] Gil Hart: mayor is Otto Pike. </reason>\n"
        "<extract> Anna Bell: spouse is Gil Hart. Gil Hart: mayor is Otto Pike. </extract>\n"
        "<answer> Otto Pike </answer>"
    )
    records = json.loads(json.dumps(transcripts_of(SPOUSES, trajectory, tiny_tokenizer, name)))
    assert [record["id"] for record in records] == ["given", "given rationale", "given evidence"]
    encoded = [encode_transcript(each, tiny_tokenizer, runner.renderer, "unused") for each in records]
    contexts = [trajectory, trajectory.branches["rationale"], trajectory.branches["evidence"]]
    for found, context in zip(encoded, contexts, strict=True):
        assert check_trajectory(context, tiny_tokenizer, system.tags, SIZES.max_context) == []
        assert found.ids == context.ids() and found.positions == context.policy_positions()
    assert [said(branch, tiny_tokenizer) for branch in contexts[1:]] == [[" Otto Pike </answer>"]] * 2
    assert GIVEN[0].text not in tiny_tokenizer.decode(encoded[2].ids)


def test_evidence_that_no_given_passage_states_gives_no_transcript(tiny_tokenizer: Tokenizer) -> None:
    system = load_system("eviomni", {})
    runner = runner_of(system, tiny_tokenizer, None)
    lost = changed(SPOUSES, TRIPLES[0], ["Gil Hart", "mayor", "Nobody"])
    (entry,) = score([lost], played(runner, [lost]), system, tiny_tokenizer)
    assert why_unusable(entry, runner) == NOT_STATED


def test_of_a_passage_that_is_cut_what_is_left_counts(tiny_tokenizer: Tokenizer) -> None:
    system = load_system("search_r1", {})
    long = replace(GIVEN[2], text="He has <think> a mayor, Otto Pike, and a rival.")
    found, whole = [GIVEN[0], long], renderer_of(system, tiny_tokenizer, 4000)
    all_ = whole.passages(found)
    seen = []
    for budget in range(len(all_) + 1):
        first, second = as_shown(found, renderer_of(system, tiny_tokenizer, budget))
        text = tiny_tokenizer.decode(all_[:budget])
        assert GIVEN[0].text.startswith(first.text) and first.text in text
        assert long.text.startswith(second.text) and second.text.replace("<think", "< think") in text
        seen.append(states(second, ("Gil Hart", "mayor", "Otto Pike")))
        assert not seen[-1] or "Otto Pike" in text
    assert (first, second) == tuple(found) and seen == sorted(seen) and seen.index(True) < len(all_) - 3


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
    """Write each question once."""
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
    """Return a function that reads the recipe in recipe.toml, with changed settings of its rollout."""
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
    with pytest.raises(
        UserError, match="--kind episode has no script for the system r1; it has search_r1, igpo, mem1, eval_rar"
    ):
        cli.run_command([*command, "--set", "system.name=r1", "--out", f"{out}2"])
    with pytest.raises(UserError, match="--template and --answer are not for episode records"):
        cli.run_command([*command, "--answer", "plain", "--out", f"{out}2"])
    for words in (["episode"], ["qa", "--recipe", "r.toml"], ["qa", "--set", "a.b=1"]):
        with pytest.raises(UserError, match="--recipe and its --set are for --kind episode, which needs --recipe"):
            cli.run_command(["data", "sft", "--kind", *words, "--questions", str(path), "--out", f"{out}2"])


def test_a_training_or_dev_question_is_refused(
    questions: list[Question], recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    recipe()
    hops, same = questions
    path, other = write(tmp_path / "warmup.jsonl", hops), tmp_path / "other.jsonl"
    sets = {name: write(tmp_path / f"{name}.jsonl", replace(same, question=f"{name}?")) for name in ("train", "dev")}
    for name in sets:
        settings = [f"data.{key}={other if key == name else file}" for key, file in sets.items()]
        for copy in (hops, replace(hops, id="other", question=hops.question.upper().replace("?", " ?"))):
            write(other, copy)
            with pytest.raises(UserError, match=f"{other}: question {copy.id} is in {path} too; "):
                episode_records(read_run_recipe(tmp_path / "recipe.toml", settings), path)


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

    runner = runner_of(load_system("eviomni", {}), tiny_tokenizer, None)
    monkeypatch.setattr(Tokenizer, "encode", lacking)
    with pytest.raises(UserError, match=r"question given, its evidence or answer: has U\+0000"):
        played(runner, [SPOUSES])


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
    """Searches use BM25, as in recipes/smollm2/search.toml."""
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
