"""Rows of `thresher reproduce` beyond trained policies: models of a server, filters, supervised baselines, and what the
evidence of one row recalls alone."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from thresher.common.errors import UserError
from thresher.engine.baselines import load_baseline
from thresher.engine.baselines.evidence import answers_from
from thresher.engine.reproduce.manifest import PaperManifest, ServedModel, read_manifest, servers_of
from thresher.engine.reproduce.pipelines import ExperimentRun, Scale, experiment_runs
from thresher.engine.reproduce.run import reproduce
from thresher.engine.reproduce.tables import _figures, _p, markdown, results_of
from thresher.engine.world.files import NUMBERED_FORMAT

PAPER = Scale("paper")


def experiment_of(manifest: PaperManifest, table: str, method: str, scale: Scale, out: Path) -> ExperimentRun:
    return next(
        cell for cell in experiment_runs(manifest, manifest.tables[table], scale, out) if cell.row.method == method
    )


def test_models_of_a_server_are_asked_at_the_address_that_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/hotpotqa_dev500.jsonl").write_text("{}")
    manifest = read_manifest("arena")
    ran: list[list[str]] = []
    reproduce("arena", ["T5"], PAPER, Path("out"), ran.append)
    said = capsys.readouterr().out
    assert ran == [] and "gpt-4o: GPT-4o" in said and "--answer-url deepseek-r1=URL" in said
    assert "\n- GPT-4o: gpt-4o is absent\n" in Path("out/arena-T5.md").read_text()
    judged = experiment_runs(
        manifest, manifest.tables["T5"], Scale("paper", overrides=("judge.model=gpt-4o",)), Path("out")
    )
    assert ["gpt-4o" in cell.lacking() for cell in judged] == [True, False, False, False]  # the row, not all judged
    urls = [("gpt-4o", "https://API.openai.com/v1"), ("deepseek-r1", "http://h:1/v1")]
    keys = ["OTHER@api.example.com", "OPENAI@api.openai.com"]
    servers = servers_of(manifest, urls, [("deepseek-r1", "r1")], keys)
    reproduce("arena", ["T5"], Scale("paper", servers=servers), Path("out"), ran.append)
    assert [words[1:3] for words in ran] == [["--answer-model", "gpt-4o"], ["--answer-model", "r1"]]
    assert ran[0][-4:] == ["--answer-url", "https://API.openai.com/v1", "--answer-key-env", "OPENAI"]
    assert ran[1][-2:] == ["--answer-url", "http://h:1/v1"]
    assert "o1: OpenAI-o1" in capsys.readouterr().out
    moved = servers_of(manifest, [("gpt-4o", "http://h:2")], [], [])  # servers move, and make the same
    reproduce("arena", ["T5"], Scale("paper", servers=moved), Path("out"), ran.append)
    assert len(ran) == 3 and ran[2] == [*ran[0][:-4], "--answer-url", "http://h:2"]
    with pytest.raises(UserError, match=r"--answer-url gpt-5=u: arena has no such model here; choose of gpt-4o, o1"):
        servers_of(manifest, [("gpt-5", "u")], [], [])
    with pytest.raises(UserError, match=r"--answer-model o1=\.\.: give --answer-url o1=URL with it"):
        servers_of(manifest, [], [("o1", "x")], [])
    with pytest.raises(UserError, match=r"--answer-model: gpt-4o and o1 are both called o1; run them apart"):
        servers_of(manifest, [("gpt-4o", "u"), ("o1", "v")], [("gpt-4o", "o1")], [])


def test_a_folder_of_the_name_that_a_server_has_for_a_model_is_no_server() -> None:
    served = ServedModel("http://h:1", "models/Qwen2.5-7B-Instruct")
    assert served.flags(["eval", "--answer-model", served.model, "--limit", "2"]) == ["--answer-url", "http://h:1"]
    for words in (
        ["eval", "--model", served.model],
        ["extract", "--agent-model", served.model],
        ["train", served.model],
    ):
        assert served.flags(words) == []


def test_what_another_model_of_the_server_answered_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: Callable[[list[str]], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/hotpotqa_dev500.jsonl").write_text("{}")
    manifest, urls = read_manifest("arena"), [("gpt-4o", "http://h:1")]

    def answered_by(name: str) -> None:
        servers = servers_of(manifest, urls, [("gpt-4o", name)], [])
        reproduce("arena", ["T5"], Scale("paper", servers=servers), Path("out"), run_command)

    answered_by("one")
    answered_by("one")
    with pytest.raises(UserError, match=r"gpt_4o-hotpotqa-seed0: was made with one, where now there is other"):
        answered_by("other")


def test_an_agent_of_a_server_reads_what_an_extractor_of_ours_leaves(tmp_path: Path) -> None:
    manifest = read_manifest("eviomni")
    scale = Scale("paper", servers={"search-r1-32b": ServedModel("http://h:1", "big", "KEY")})
    *_, alone, with_eviomni = experiment_runs(manifest, manifest.tables["T5"], scale, tmp_path)
    (answering,), (extraction,) = alone.columns["nq"], with_eviomni.columns["nq"]
    asked, read = " ".join(answering.to_run(scale)), " ".join(extraction.to_run(scale))
    assert asked.startswith("eval --answer-model big --set")
    assert asked.endswith("--answer-url http://h:1 --answer-key-env KEY")
    assert "--loop agentic --agent-name big" in read and "retrieval.k=3" in extraction.words
    assert read.endswith("--agent-url http://h:1 --key-env KEY")
    assert "search-r1-32b" not in alone.lacking() | with_eviomni.lacking()
    *_, with_eviomni = experiment_runs(manifest, manifest.tables["T5"], PAPER, tmp_path)
    assert "search-r1-32b" in with_eviomni.lacking()


def test_a_filter_is_tuned_on_questions_and_its_evidence_answered_from(tmp_path: Path) -> None:
    manifest = read_manifest("eviomni")
    invented = f"{tmp_path}/world/data/given_train.jsonl"
    for scale, questions in ((PAPER, "data/nq_train.jsonl"), (Scale("world"), invented)):
        cell = experiment_of(manifest, "T2", "filco", scale, tmp_path)
        data, tuned, _ = (" ".join(command.words) for command in cell.before[-3:])
        assert data.startswith(f"data sft --kind filco --questions {questions} --measure inclusion")
        assert f"sft.transcripts={tmp_path}/tunings/filco.jsonl" in tuned
        extraction, answering = cell.columns["nq"]
        assert extraction.words[1:3] == ("--model", str(cell.before[-2].folder)) and "filco" in extraction.words
        assert f"system.options.file={extraction.folder}" in answering.words
        latency = experiment_of(manifest, "T4", "filco_latency", scale, tmp_path)
        assert latency.before == cell.before[:-1] and len(latency.columns["nq"]) == 1


def test_supervised_baselines_answer_as_they_were_tuned(tmp_path: Path) -> None:
    manifest = read_manifest("arena")
    for method, asked in (("sft_direct", "--baseline full_passages"), ("sft_reasoning", "--set system.name=arena")):
        cell = experiment_of(manifest, "T3", method, PAPER, tmp_path)
        (answering,) = cell.columns["musique"]
        words = " ".join(answering.words)
        assert asked in words and "--prompt chat" in words
        assert answering.words[2] == str(cell.before[-1].folder) and cell.before[-1].words[0] == "sft"
    made = cell.before[0].words
    assert made[:4] == ("data", "sft", "--kind", "reasoning") and made[made.index("--model") + 1] in cell.lacking()
    on_cpu = (
        experiment_of(manifest, "T3", method, Scale("paper", overrides=("model.device=cpu",)), tmp_path).before[0].words
    )
    assert [words[words.index("--device") + 1] for words in (made, on_cpu)] == ["cuda", "cpu"]


def test_whoever_reads_many_passages_has_room_for_them(tmp_path: Path) -> None:
    """MuSiQue's 20 paragraphs are 2,454 tokens on average: an extractor that is trained on 5 passages reads them all
    the same, and LLMLingua-2 leaves 540 of them, which the generator is shown whole."""
    manifest, room = read_manifest("eviomni"), "rollout.max_passage_tokens=3072"
    scale = Scale("paper", overrides=("rollout.max_passage_tokens=5000",))
    for method in ("filco", "cot", "eviomni"):
        cell = experiment_of(manifest, "T10", method, scale, tmp_path)
        words = cell.columns["musique"][0].words
        assert words[0] == "extract" and words.index(room) < words.index(scale.overrides[0])  # of two the last counts
        assert not any(room in command.words for command in cell.before)
    invented = experiment_of(manifest, "F5", "eviomni", Scale("world"), tmp_path)
    assert not any(room in command.words for command in invented.every())
    whole, evidence = load_baseline("full_passages", {}), answers_from({}, "a file")
    assert evidence.preset["rollout"]["max_passage_tokens"] == whole.preset["rollout"]["max_passage_tokens"] == 3072


def test_what_an_override_replaces_or_no_reward_asks_is_not_wanted(tmp_path: Path) -> None:
    manifest = read_manifest("evinote")
    own = Scale("paper", overrides=("retrieval.index=mine",))
    for method in ("naive_rag", "sen", "sen_eqr"):
        table = "T1" if method == "naive_rag" else "T5"
        wanted, without = (experiment_of(manifest, table, method, scale, tmp_path).lacking() for scale in (PAPER, own))
        assert "indexes/wiki18" in wanted and without.keys() == wanted.keys() - {"indexes/wiki18"}
        assert ("models/distilbert-mnli" in wanted) == (method == "sen_eqr")


def test_a_p_value_says_where_seeds_disagree_and_what_it_cannot_go_below() -> None:
    row = {0: {str(n): float(n % 10) for n in range(200)}, 1: {str(n): 0.0 for n in range(200)}}
    other = {0: {id_: value - 1.0 for id_, value in row[0].items()}, 1: {id_: int(id_) / 400 for id_ in row[0]}}
    assert _p(_figures(row, other)).endswith(" *") and not _p(_figures({0: row[0]}, {0: other[0]})).endswith("*")
    # Seeds are paired by their number, whatever the order of what was run; a row that no seed changes, with every one.
    assert _figures(row, dict(reversed(other.items()))) == _figures(row, other)
    assert _figures({0: row[1]}, other)["differences"] == [-3.5, pytest.approx(-0.24875)]
    assert len(_figures({0: row[0], 2: row[1]}, other)["differences"]) == 1
    least = _p(_figures({0: {str(n): 1.0 + n for n in range(200)}}, {0: {str(n): 0.0 for n in range(200)}}))
    assert least == "≤ 0.0001"


def test_in_the_world_what_asks_for_no_notes_has_a_prompt_without(tmp_path: Path) -> None:
    manifest = read_manifest("evinote")
    for method, prompt in (("base", "search_r1"), ("ns", "evinote"), ("sen_eqr", "evinote")):
        words = experiment_of(manifest, "T5", method, Scale("world"), tmp_path).before[-1].words
        assert f"system.template={tmp_path}/world/{prompt}.txt" in words and "system.name=evinote" in words


def test_arenas_rows_start_from_a_base_that_names_numbers(tmp_path: Path) -> None:
    for paper, table, folder, passages in (
        ("arena", "F2", "numbered1", NUMBERED_FORMAT),
        ("evinote", "T5", "base1", ""),
    ):
        manifest = read_manifest(paper)
        for cell in experiment_runs(manifest, manifest.tables[table], Scale("world", (1,)), tmp_path):
            *_, base, training = cell.before
            assert base.folder == tmp_path / "world" / folder and f"model.path={base.folder}" in training.words
            assert not passages or f'retrieval.passage_format="{passages}"' in training.words


def test_of_two_rows_what_each_recalls_alone(tmp_path: Path) -> None:
    """Of four questions with a gold passage both recall one; a seed that only one row has does not count."""
    manifest = read_manifest("eviomni")
    table, scale = manifest.tables["F2"], Scale("paper", (0, 1))
    cells = experiment_runs(manifest, table, scale, tmp_path)
    recalled = {("vanilla_evidence", 0): "ab", ("rational_evidence", 0): "bcd", ("rational_evidence", 1): "abcd"}
    for cell in cells:
        if (held := recalled.get((cell.row.method, cell.seed))) is None:
            continue
        file = cell.columns["hotpotqa"][0].folder
        file.parent.mkdir(exist_ok=True)
        lines = [
            {"id": id_, "evidence": "Ada" * (id_ in held), "passages": [{"text": "Eva" if id_ == "e" else "Ada"}]}
            | {"golden_answers": ["Ada"]}
            for id_ in "abcde"
        ]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        file.with_suffix(".json").write_text(json.dumps({"figures": {}}))
    results = results_of(manifest, table, scale, cells)
    vanilla, rational = (row["ours"]["recall_evidence"]["hotpotqa"] for row in results["rows"])
    assert (vanilla["mean"], rational["mean"]) == (1 / 4, 2 / 4) and vanilla["questions"] == 4
    assert rational["seeds"] == [2 / 4] and "nq" not in results["rows"][0]["ours"]["recall_evidence"]
    assert "| Rational evidence alone | - | .145 | .500 |" in markdown(results)
