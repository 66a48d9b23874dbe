"""Test `thresher reproduce`: the contents of manifests, the commands that their rows become (trained policies, models
of a server, filters, supervised baselines), and the table. Running them: test_reproduce_running.py."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

from thresher.cli import main as cli
from thresher.common.errors import UserError
from thresher.engine.assemble import read_run_recipe
from thresher.engine.baselines import load_baseline
from thresher.engine.baselines.reading import answers_from
from thresher.engine.config.recipe import load_recipe
from thresher.engine.planning.time import CHIPS
from thresher.engine.reports import report as comparison
from thresher.engine.reproduce import run
from thresher.engine.reproduce.manifest import (
    PaperManifest,
    ServedModel,
    files_of,
    paper_names,
    read_manifest,
    servers_of,
)
from thresher.engine.reproduce.pipelines import ExperimentRun, Scale, experiment_runs, in_world, prompt_name
from thresher.engine.reproduce.run import reproduce
from thresher.engine.reproduce.tables import _figures, _p, listing, markdown, plan_in_words, read_column, results_of
from thresher.engine.systems import load_system
from thresher.engine.world.files import NUMBERED_FORMAT
from thresher.engine.world.stages import BASES, RECIPES

PAPER, WORLD = Scale("paper"), Scale("world")


def experiments(manifest: PaperManifest | str, table: str, scale: Scale, out: Path) -> list[ExperimentRun]:
    manifest = read_manifest(manifest) if isinstance(manifest, str) else manifest
    return experiment_runs(manifest, manifest.tables[table], scale, out)


def experiment_of(manifest: PaperManifest, table: str, method: str, scale: Scale, out: Path) -> ExperimentRun:
    return next(one for one in experiments(manifest, table, scale, out) if one.row.method == method)


@pytest.fixture
def asked_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a working directory that contains only HotpotQA's questions."""
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/hotpotqa_dev500.jsonl").write_text("{}")


@pytest.mark.parametrize("name", paper_names())
def test_a_manifest_agrees_with_itself_and_with_what_is_there(name: str) -> None:
    manifest, parser = read_manifest(name), cli.build_parser()
    models = {model.paper for model in manifest.models.values()}
    assert manifest.world_base in BASES
    assert {model.prompt for model in manifest.models.values()} <= {None, *manifest.files}
    for method in manifest.methods.values():
        assert [method.system is not None, method.baseline is not None, method.refiner != ()].count(True) == 1
        assert {method.warmup, method.generator} <= {*manifest.tunings, None}
        assert {method.agent, method.encoder} <= {*manifest.models, None}
        assert method.baseline != "released" or all(
            manifest.models[row.model].prompt is not None
            for table in manifest.tables.values()
            for row in table.rows
            if manifest.methods[row.method] is method
        )
        assert method.trained_as in {*manifest.methods, None}
        if method.system is not None:
            load_system(method.system, method.options)
        if method.baseline is not None:
            load_baseline(method.baseline, method.options)
        if method.recipe is not None:
            assert set(files_of(str(RECIPES / method.recipe))) <= manifest.files.keys() | models
    for tuning in manifest.tunings.values():
        made_of = tuning.teacher or tuning.questions
        assert (tuning.format is None) == (tuning.kind is not None) == (made_of in manifest.files)
        assert load_recipe(RECIPES / tuning.recipe).sft is not None
    for table in manifest.tables.values():
        labels = [manifest.label(row) for row in table.rows]
        assert len(set(labels)) == len(labels) and (table.against is None or table.against in labels)
        assert (table.columns or table.curves) and set(table.columns) <= manifest.sets.keys()
        assert not table.alone or len(labels) == 2
        assert set(table.bars) <= set(table.measures) and not (table.bars and table.curves)  # they share a page
        for row in table.rows:
            assert (
                row.method in manifest.methods and row.model in manifest.models and {*row.printed} <= {*table.measures}
            )
            assert {len(numbers) for numbers in row.printed.values()} <= {len(table.columns) + table.average}
        for scale in (PAPER, WORLD):
            for cell in experiment_runs(manifest, table, scale, Path("x")):
                for command in cell.every():
                    assert parser.parse_args(list(command.words)).handler
    assert len(listing(manifest, CHIPS["H100"])) == sum(len(table.rows) for table in manifest.tables.values())


def test_of_a_teachers_right_answers_to_warmed_extractors(tmp_path: Path) -> None:
    manifest = read_manifest("eviomni")
    for scale, teachers in ((Scale("world", (0, 1)), 1), (Scale("paper", (0, 1)), 0)):
        cells = experiments(manifest, "T1", scale, tmp_path)
        commands = list(dict.fromkeys(command for cell in cells for command in cell.before))
        tunings = [command for command in commands if "tunings" in str(command.folder)]
        heads = [" ".join(command.words[:2]) if command.words[0] == "data" else command.words[0] for command in tunings]
        assert [heads.count(name) for name in ("eval", "data sft", "sft")] == [teachers, 2, 4]  # one warm-up per seed
        for cell in cells:
            for (extraction,) in cell.columns.values():
                words = list(extraction.words)
                assert words[0] == "extract" and words[words.index("--evidence-tokens") + 1] == "100"
                assert words[words.index("--model") + 1] == str(cell.before[-1].folder)
    lacking = cells[0].lacking()
    assert {"data/nq_teacher/trajectories.jsonl", "models/Qwen2.5-1.5B-Instruct", "indexes/wiki18"} <= lacking.keys()


def test_evidence_counts_where_a_passage_holds_the_gold(tmp_path: Path) -> None:
    file = tmp_path / "e.jsonl"
    record = {"golden_answers": ["Ada"], "evidence": "Ada", "rationale": "", "compression_ratio": 2.0}
    shown = [[{"text": "Ada"}], [{"text": "Eva"}]]
    lines = [json.dumps({"id": str(n), "passages": passages} | record) for n, passages in enumerate(shown)]
    file.write_text("\n".join(lines) + "\n")
    assert list(read_column([file], None)) == ["0", "1"]
    found = read_column([file], None, "recall_passages")
    assert list(found) == ["0"] and (found["0"]["compression"], found["0"]["recall_rationale"]) == (2.0, 0.0)


def test_a_figure_has_its_rows_trainings_over_each_other(
    tmp_path: Path, run_command: Callable[[list[str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(comparison, "write_curves", lambda *given: drawn.append(given))

    def trained(words: list[str]) -> None:
        run_command(words)
        if words[0] == "train":
            (Path(words[words.index("--out") + 1]) / "metrics.jsonl").write_text("")

    reproduce("eval_rar", ["F3"], Scale("world", (0, 1)), tmp_path, trained)
    ((title, groups, out, chosen),) = drawn
    assert title == "Eval-RAR: Training beside Search-R1 (the figure prints no numbers)"
    assert [len(folders) for folders in groups.values()] == [2, 2] and out == tmp_path / "eval_rar-F3.html"
    assert chosen == ("reward", "length", "searches") and [*groups] == ["Eval-RAR (base)", "Search-R1 (base)"]
    at_scale = {(cell.row.method, cell.row.model) for cell in experiments("eval_rar", "F3", PAPER, tmp_path)}
    assert at_scale == {*product(("eval_rar", "search_r1"), ("base", "instruct"))}


def test_bars_have_a_group_per_column_and_the_parts_of_the_reward(
    tmp_path: Path, run_command: Callable[[list[str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With s the seed: format is 1 - s/4 on each question, relevance s on those of two relations. Naive-GRPO, whose
    reward has no relevance, has no such bar; no judge, no bars of verdicts."""
    drawn: list[Any] = []
    monkeypatch.setattr(comparison, "draw", lambda chart: drawn.append(chart) or b"")

    def ran(words: list[str]) -> None:
        run_command(words)
        if words[0] != "eval":
            return
        out = Path(words[words.index("--out") + 1])
        seed = int(out.name.rpartition("seed")[2])
        records = [json.loads(line) for line in (out / "trajectories.jsonl").read_text().splitlines()]
        for n, record in enumerate(records):
            record["measures"] = {"em_arena": 0.5}
            relevance = {} if "naive" in out.name else {"relevance": seed * (n % 2)}
            record["parts"] = {"format": 1 - seed / 4, "em_arena": 9.0} | relevance
        (out / "trajectories.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    found = reproduce("arena", ["F2"], Scale("world", (0, 1)), tmp_path, ran)["F2"]
    bars = {
        chart.title: {s.label: (s.values.tolist(), pytest.approx(s.spread.tolist())) for s in chart.series}
        for chart in drawn
    }
    assert {(chart.groups, *series.steps) for chart in drawn for series in chart.series} == {
        (("HotpotQA", "2Wiki"), 0, 1)
    }
    naive, *others = ("Naive-GRPO", "ARENA, format and EM alone", "ARENA without KL stabilisation", "ARENA")
    root = 2**-0.5  # the deviation of two values is their difference by this
    assert bars == {
        "Exact match as ARENA normalises": dict.fromkeys([naive, *others], ([0.5, 0.5], [0, 0])),
        "Reward's part: format": dict.fromkeys([naive, *others], ([0.875, 0.875], [root / 4, root / 4])),
        "Reward's part: relevance": dict.fromkeys(others, ([0.5, 0], [root, 0])),
    }
    _, _, relevance = markdown(found).partition("## `relevance`")
    assert "| Naive-GRPO | - | - |" in relevance and "| ARENA | .500 ± .707 | .000 ± .000 |" in relevance


def test_a_listed_row_says_its_stages_and_its_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    manifest = read_manifest("eviomni")
    model = Path("models/Qwen2.5-1.5B-Instruct")
    listed = listing(read_manifest("eval_rar"), CHIPS["H100"], ["T1"])
    assert [one["row"] for one in listed if one["world"]] == ["Search-R1 (base)", "Eval-RAR (base)"]  # not (instruct)
    (_, rational, *_, eviomni, _) = listing(manifest, CHIPS["H100"], ["T1", "T2", "own"])
    assert rational["stages"] == ["sft eviomni/warmup.toml", "extract"] and rational["planned"] is None
    assert listing(manifest, CHIPS["H100"], ["F4"])[0]["stages"] == eviomni["stages"][:1]  # a figure runs no question
    assert eviomni["planned"]["absent"] == str(model / "config.json") and "hf download" in eviomni["planned"]["get"]
    model.mkdir(parents=True)
    (model / "config.json").write_bytes((RECIPES / "world" / "config.json").read_bytes().replace(b"1024", b"4096"))
    (*_, own) = listing(manifest, CHIPS["H100"], ["own"], ["run.steps=7"])
    assert own["planned"]["fits"] and own["planned"]["seconds"] == own["planned"]["seconds_per_step"] * 7
    assert "GB, " in plan_in_words(own["planned"], own["needs"])


@pytest.mark.parametrize("name", paper_names())
def test_in_the_world_no_table_is_of_questions_that_chose_a_checkpoint(name: str, tmp_path: Path) -> None:
    manifest = read_manifest(name)
    for table in manifest.tables.values():
        for cell in experiment_runs(manifest, table, WORLD, tmp_path):
            given = "data.dev=" + str(tmp_path / "world" / "data" / "given_")
            for words in (command.words for command in cell.before if command.words[0] == "train"):
                (dev,) = (word for word in words if word.startswith("data.dev="))
                assert dev.endswith("dev.jsonl")
            for command in (command for chain in cell.columns.values() for command in chain):
                asked = Path(command.words[command.words.index("--questions") + 1])
                assert asked.name in ("test.jsonl", "given_test.jsonl") and asked.parent.name == "data"
                trained = [word for other in cell.before for word in other.words if word.startswith("data.dev=")]
                shown = [*trained, *(word for word in command.words if word.startswith("data.dev="))]
                assert (asked.name == "given_test.jsonl") in {word.startswith(given) for word in shown or [given]}


def test_overrides_and_a_limit_reach_every_command(tmp_path: Path) -> None:
    manifest = read_manifest("eval_rar")
    for name in ("paper", "world"):
        scale = Scale(name, overrides=("run.steps=2", "judge.url=http://x"), limit=3)
        for cell in experiments(manifest, "T1", scale, tmp_path):
            trains = [command for command in cell.before if command.words[0] == "train"]
            assert all("run.steps=2" in command.words for command in trains)
            for (command,) in cell.columns.values():
                assert command.words[command.words.index("--limit") + 1] == "3"
                assert ("run.steps=2" in command.words) != ("--best-of" in command.words)
                assert "judge.url=http://x" in command.words


@pytest.mark.parametrize("name", ["paper", "world"])
def test_a_command_gets_the_overrides_of_its_sections_and_at_paper_scale_a_gpu(name: str, tmp_path: Path) -> None:
    manifest, here = read_manifest("eviomni"), {"model.device=cpu", "model.dtype=float32"}
    scale = Scale(name, overrides=(*sorted(here), "data.limit=3", "optim.offload=masters", "sft.steps=2"))
    wanted = {
        "train": here | {"data.limit=3", "optim.offload=masters"},
        "sft": here | {"sft.steps=2"},
        "eval": here,
        "extract": here,
        "data": set[str](),
    }
    cells = [cell for table in ("T1", "T2", "own") for cell in experiments(manifest, table, scale, tmp_path)]
    every = {command.words: command for cell in cells for command in cell.every()}
    fixed = ("world", "teacher")  # parts of the world: its base, and the base's answers to the training questions
    ours = [
        words for words, command in every.items() if not set(fixed) & set(command.folder.relative_to(tmp_path).parts)
    ]
    assert {words[0] for words in ours} == wanted.keys()
    for words in ours:
        if words[0] == "eval" and "--best-of" in words:  # it uses the run's recipe
            continue
        assert set(scale.overrides) & set(words) == wanted[words[0]], words
        told = [words.index(key) for key in ("model.device=cuda", "model.dtype=bfloat16") if key in words]
        assert len(told) == 2 * (name == "paper" and words[0] in ("eval", "extract") and "--best-of" not in words)
        assert all(at < words.index("model.device=cpu") for at in told)


def test_a_training_that_was_begun_goes_on(tmp_path: Path) -> None:
    manifest = read_manifest("eval_rar")
    cell = experiments(manifest, "T2", WORLD, tmp_path)[0]
    train = cell.before[-1]
    scale = Scale("world", allow_keys=("KEY@api.example.com",))
    assert "--resume" not in train.to_run(scale) and not train.finished
    train.folder.mkdir(parents=True)
    assert train.to_run(scale)[-3:] == ["--allow-key", "KEY@api.example.com", "--resume"]
    assert "--allow-key" not in cell.before[0].to_run(scale)


def test_columns_of_the_same_noise_share_an_evaluation_in_the_world(tmp_path: Path) -> None:
    manifest = read_manifest("eviomni")
    (cell, _, full) = experiments(manifest, "F5", WORLD, tmp_path)
    asked = {column: " ".join(chain[0].words) for column, chain in cell.columns.items()}
    assert asked["nq"] == asked["hotpotqa"] and "--distractors" not in asked["nq"]
    assert asked["nq_noise8"] == asked["hotpotqa_noise8"] and "--distractors 8" in asked["nq_noise8"]
    assert len({chain[-1].folder for chain in cell.columns.values()}) == 5 and len(asked) == 10
    (trained, *_) = experiments(manifest, "F5", PAPER, tmp_path)
    extraction, answering = (" ".join(command.words) for command in trained.columns["tqa_noise4"])
    assert "--distractors 4" in extraction and "--distractors" not in answering  # it is given evidence
    assert "--distractors 4" in " ".join(full.columns["nq_noise4"][-1].words)


def test_at_paper_scale_what_is_absent_is_said_and_the_rest_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    ran: list[list[str]] = []
    reproduce("eval_rar", ["T1"], PAPER, Path("out"), ran.append)
    said = capsys.readouterr().out
    assert ran == [] and said.count("models/Qwen2.5-3B: hf download") == 1 and "data/nq_test.jsonl: NQ's" in said
    for path in ("models/Qwen2.5-3B-Instruct/config.json", "data/nq_test.jsonl"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text("{}")
    reproduce("eval_rar", ["T1"], PAPER, Path("out"), ran.append)
    assert [words[0] for words in ran] == ["eval"] * 2  # without retrieval
    Path("indexes/wiki18").mkdir(parents=True)
    reproduce("eval_rar", ["T1"], PAPER, Path("out"), ran.append)
    assert len(ran) == 2 + 5  # three of them name an index of their own; nothing here is ever finished
    assert all("data/nq_test.jsonl" in words for words in ran) and {"direct", "cot"} <= {words[-5] for words in ran}


def test_the_printed_average_stands_beside_ours_where_every_column_is_there(tmp_path: Path) -> None:
    manifest = read_manifest("eval_rar")
    table = manifest.tables["T2"]
    scale = Scale("paper", overrides=("run.steps=2",), limit=3)
    cells = experiment_runs(manifest, table, scale, tmp_path)
    for number, command in enumerate(chain[0] for chain in cells[0].columns.values()):
        command.folder.mkdir(parents=True)
        record = {"id": "q", "question": "?", "parts": {}, "measures": {"em": float(number % 2)}}
        (command.folder / "trajectories.jsonl").write_text(json.dumps(record) + "\n")
        (command.folder / "metrics.json").write_text("{}")
    page = markdown(results_of(manifest, table, scale, cells))
    assert "Seeds: 1, of every set the first 3 questions, run.steps=2." in page
    assert "Average, printed | ours |" in page and "| .404 | .429 |" in page and "| .353 | - |" in page
    again = [cells[0], replace(cells[0], seed=1)]
    assert "| .404 | .429 ± .000 |" in markdown(results_of(manifest, table, Scale("paper", (0, 1)), again))


@pytest.mark.parametrize(
    ("paper", "table"), [("eviomni", "T2"), ("eviomni", "T2_7B"), ("lear", "T4"), ("lear", "T4_7B")]
)
def test_eviomnis_printed_f1_stands_beside_f1_over_characters(paper: str, table: str, tmp_path: Path) -> None:
    manifest, scale = read_manifest(paper), Scale("paper")
    assert not any("f1" in row.printed for other in manifest.tables.values() for row in other.rows)
    cells = experiments(manifest, table, scale, tmp_path)
    folder = cells[0].columns["nq"][-1].folder
    folder.mkdir(parents=True)
    measures = {"em": 0.0, "f1": 0.25, "char_f1": 0.75}
    record = {"id": "q", "question": "?", "parts": {}, "measures": measures}
    (folder / "trajectories.jsonl").write_text(json.dumps(record) + "\n")
    (folder / "metrics.json").write_text("{}")
    page = markdown(results_of(manifest, manifest.tables[table], scale, cells))
    characters, tokens = (page.partition(f"## `{name}`")[2].partition("##")[0] for name in ("char_f1", "f1"))
    printed = cells[0].row.printed["char_f1"][0]
    assert f"| Zero | {printed:.3f}".replace("0.", ".") + " | .750 |" in characters
    assert "| Zero | .250 |" in tokens and "printed" not in tokens


def test_the_world_has_methods_that_its_base_knows_and_one_model_of_each(tmp_path: Path) -> None:
    manifest = read_manifest("eval_rar")
    known = [name for name, method in manifest.methods.items() if in_world(method)]
    assert known == ["eval_rar", "without_evaluation", "search_r1"]
    cells = experiments(
        manifest, "T1", WORLD, tmp_path
    )  # of the models, only that of the row with which others are compared
    assert [manifest.label(cell.row) for cell in cells] == ["Search-R1 (base)", "Eval-RAR (base)"]


def test_what_is_refused() -> None:
    with pytest.raises(UserError, match=r"no paper 'evalrar'; choose one of .*eval_rar"):
        read_manifest("evalrar")
    with pytest.raises(UserError, match="eval_rar has no table 'T9' here; choose from T1, T2"):
        reproduce("eval_rar", ["T9"], PAPER, Path("x"), print)
    for paper, table in (("arena", "T11"), ("eviomni", "T6")):
        with pytest.raises(UserError, match=f"{table} has none of its question sets or of its rows in the invented"):
            reproduce(paper, [table], WORLD, Path("x"), print)


@pytest.mark.parametrize(
    ("paper", "table", "scale", "text", "key"),
    [
        *(("eval_rar", "T2", name, "run.seed=7", "run.seed") for name in ("paper", "world")),
        ("eval_rar", "T2", "paper", "model.path=models/other", "model.path"),
        ("eval_rar", "T2", "paper", "system . name = search_r1", "system.name"),
        ("eval_rar", "T2", "paper", "system.template=mine.txt", "system.template"),
        ("eval_rar", "T2", "paper", "system.options.evaluation_reward=true", "system.options.evaluation_reward"),
        ("eval_rar", "T2", "paper", "model=", "model"),
        ("eval_rar", "T2", "world", "retrieval.index=mine", "retrieval.index"),
        ("eviomni", "T2", "paper", "sft.transcripts=mine.jsonl", "sft.transcripts"),
        ("arena", "T4", "paper", "data.train=mine.jsonl", "data.train"),
        ("arena", "F4", "paper", "grpo.kl_value=k2", "grpo.kl_value"),
    ],
)
def test_a_key_that_the_rows_set_themselves_is_refused(
    paper: str, table: str, scale: str, text: str, key: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        reproduce(paper, [table], Scale(scale, overrides=("run.steps=2", text)), tmp_path / "out", print)
    assert str(caught.value).startswith(f"--set {text}: the rows of these tables set {key} themselves; leave it out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("paper", "table", "text"),
    [
        ("eval_rar", "T2", "retrieval.index=mine"),
        ("arena", "T3", "data.train=mine.jsonl"),
        ("arena", "T4", "grpo.kl_value=k3"),
        ("arena", "T4", "optim.offload=masters"),
        ("eviomni", "T5", "rollout.max_turn_tokens=64"),
    ],
)
@pytest.mark.usefixtures("asked_file")
def test_a_key_that_all_rows_share_is_accepted(paper: str, table: str, text: str) -> None:
    reproduce(paper, [table], Scale("paper", overrides=(text,)), Path("out"), print)


def test_a_papers_own_prompts_replace_ours_at_paper_scale(tmp_path: Path) -> None:
    """A command that names its system gets the file; one that continues from a run uses the run's recipe."""
    manifest, prompts = read_manifest("eval_rar"), tmp_path / "prompts"
    prompts.mkdir()
    (prompts / "eval_rar.txt").write_text("{question}")
    own = f"system.template={prompts / 'eval_rar.txt'}"
    cells = experiments(manifest, "T1", Scale("paper", prompts=prompts), tmp_path)
    plain = experiments(manifest, "T1", PAPER, tmp_path)
    changed = set()
    for cell, before in zip(cells, plain, strict=True):
        for command, same in zip(cell.every(), before.every(), strict=True):
            if own in command.words:
                assert [word for word in command.words if word != own][:1] == [same.words[0]]
                changed.add((cell.row.method, command.words[0]))
            else:
                assert command.words == same.words
    assert ("eval_rar", "train") in changed and {method for method, _ in changed} == {"eval_rar"}

    def refused(scale: Scale) -> str:
        with pytest.raises(UserError) as caught:
            reproduce("eval_rar", ["T1"], scale, tmp_path / "out", lambda words: None)
        return str(caught.value)

    assert "give it with --scale paper" in refused(Scale("world", prompts=prompts))
    (prompts / "eval-rar.txt").write_text("{question}")
    assert "eval-rar.txt: no row of these tables uses it; name a file after" in refused(Scale("paper", prompts=prompts))
    assert "holds no prompt" in refused(Scale("paper", prompts=tmp_path / "none"))


@pytest.mark.parametrize(
    ("paper", "table", "method", "name", "told"),
    [
        ("arena", "T3", "sft_direct", "full_passages", {"sft sft.template", "eval system.template"}),
        # Records of this kind get the prompt of the tuning's recipe.
        ("arena", "T3", "sft_reasoning", "arena", {"sft system.template", "eval system.template"}),
        ("eviomni", "T1", "vanilla_evidence", "extract_only", {"data --template", "extract system.template"}),
        ("eviomni", "T1", "rational_evidence", "eviomni", {"data --template", "extract system.template"}),
        ("eviomni", "T2", "eviomni", "eviomni", {"train system.template"}),  # and not its generator
    ],
)
def test_a_tuned_model_learns_the_prompt_in_which_it_is_asked(
    paper: str, table: str, method: str, name: str, told: set[str], tmp_path: Path
) -> None:
    file = tmp_path / f"{name}.txt"
    file.write_text("{question}")
    cell = experiment_of(read_manifest(paper), table, method, Scale("paper", prompts=tmp_path), tmp_path / "out")
    words = [(command.words[0], *pair) for command in cell.every() for pair in pairwise(command.words)]
    assert told == {
        f"{command} {word.partition('=')[0] if '=' in word else flag}"
        for command, flag, word in words
        if str(file) in word
    }


@pytest.mark.parametrize("paper", paper_names())
def test_a_prompt_that_is_accepted_is_used(paper: str, tmp_path: Path) -> None:
    manifest = read_manifest(paper)
    for table in manifest.tables.values():
        names = {prompt_name(*one) for one in run._asked(manifest, {"": table})}
        for name in names:
            (tmp_path / f"{name}.txt").write_text("{question}")
        cells = experiment_runs(manifest, table, Scale("paper", prompts=tmp_path), tmp_path / "out")
        words = " ".join(word for cell in cells for command in cell.every() for word in command.words)
        assert [name for name in names if f"{tmp_path}/{name}.txt" not in words] == [], table.caption


@pytest.mark.parametrize(
    ("paper", "table", "file", "text", "problem"),
    [
        ("eval_rar", "T1", "eval_rar", "Answer.", "needs {question} exactly once, found 0"),
        ("eval_rar", "T1", "eval_rar", "{question} {question}", "needs {question} exactly once, found 2"),
        ("eval_rar", "T1", "eval_rar", "{question} {passages}", "of this system must not contain {passages}, found 1"),
        ("eval_rar", "T1", "naive_rag", "{question}", "needs {passages} exactly once, found 0"),
        ("arena", "T3", "arena", "{passages}", "needs {question} exactly once, found 0"),
        ("arena", "T3", "research", "Answer.", "needs {question} exactly once, found 0"),
        ("eviomni", "T5", "search_r1", "{question} {passages}", "of this system must not contain {passages}, found 1"),
    ],
)
def test_a_prompt_with_other_placeholders_is_refused_by_its_file_before_anything_runs(
    paper: str, table: str, file: str, text: str, problem: str, tmp_path: Path
) -> None:
    own = tmp_path / f"{file}.txt"
    own.write_text(text)
    with pytest.raises(UserError) as caught:
        reproduce(paper, [table], Scale("paper", prompts=tmp_path), tmp_path / "out", lambda words: None)
    assert str(caught.value) == f"{own}: a prompt template {problem}" and not (tmp_path / "out").exists()


def test_a_released_checkpoint_is_asked_in_its_own_prompt(tmp_path: Path) -> None:
    """The manifest names the file and its source; a file of --prompts with its name replaces it."""
    for paper, table, method, name in (
        ("evinote", "T1", "r1_searcher", "r1_searcher"),
        ("arena", "T3", "simple_deep_searcher", "simple_deep_searcher"),
        ("arena", "T3", "research", "research"),
        ("eviomni", "T5", "search_r1", "search_r1"),
        ("eviomni", "T5", "search_r1_eviomni", "search_r1"),
    ):
        manifest = read_manifest(paper)
        (tmp_path / f"{name}.txt").write_text("{question}")
        for scale, file in (
            (PAPER, f"prompts/{name}.txt"),
            (Scale("paper", prompts=tmp_path), f"{tmp_path}/{name}.txt"),
        ):
            cell = experiment_of(manifest, table, method, scale, tmp_path / "out")
            for (command,) in cell.columns.values():
                words = list(command.words)
                if command.words[0] == "extract":  # the agent, not the extractor that it calls
                    assert words[words.index("--agent-template") + 1] == file
                    assert not any(word.startswith("system.template") for word in words)
                else:
                    assert f"system.template={file}" in words
            assert (file in cell.lacking()) == (scale is PAPER)


def test_rows_that_differ_in_the_system_are_trained_alike() -> None:
    """Eval-RAR follows Search-R1's settings: two updates per batch, one warm-up of the learning rate."""
    manifest = read_manifest("eval_rar")
    recipes = [read_run_recipe(RECIPES / str(manifest.methods[name].recipe), []) for name in ("search_r1", "eval_rar")]
    assert [line.split()[0] for line in recipes[0].differences(recipes[1])] == ["system.name"]
    assert recipes[1].grpo.updates_per_batch == 2 and recipes[1].optim.warmup_ratio == 0.285


def test_what_nothing_trains_is_asked_of_an_instruct_model() -> None:
    for row in read_manifest("eval_rar").tables["T1"].rows:
        trained = read_manifest("eval_rar").methods[row.method].recipe is not None
        assert trained or row.model == "instruct"


@pytest.mark.usefixtures("asked_file")
def test_models_of_a_server_are_asked_at_the_address_that_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    manifest = read_manifest("arena")
    ran: list[list[str]] = []
    reproduce("arena", ["T5"], PAPER, Path("out"), ran.append)
    said = capsys.readouterr().out
    assert ran == [] and "gpt-4o: GPT-4o" in said and "--answer-url deepseek-r1=URL" in said
    assert "\n- GPT-4o: gpt-4o is absent\n" in Path("out/arena-T5.md").read_text()
    judged = experiments(manifest, "T5", Scale("paper", overrides=("judge.model=gpt-4o",)), Path("out"))
    assert ["gpt-4o" in cell.lacking() for cell in judged] == [True, False, False, False]  # its row, not all judged
    urls = [("gpt-4o", "https://API.openai.com/v1"), ("deepseek-r1", "http://h:1/v1")]
    keys = ["OTHER@api.example.com", "OPENAI@api.openai.com"]
    servers = servers_of(manifest, urls, [("deepseek-r1", "r1")], keys)
    reproduce("arena", ["T5"], Scale("paper", servers=servers), Path("out"), ran.append)
    assert [words[1:3] for words in ran] == [["--answer-model", "gpt-4o"], ["--answer-model", "r1"]]
    assert ran[0][-4:] == ["--answer-url", "https://API.openai.com/v1", "--answer-key-env", "OPENAI"]
    assert ran[1][-2:] == ["--answer-url", "http://h:1/v1"]
    assert "o1: OpenAI-o1" in capsys.readouterr().out
    moved = servers_of(manifest, [("gpt-4o", "http://h:2")], [], [])  # a server may move and gives the same results
    reproduce("arena", ["T5"], Scale("paper", servers=moved), Path("out"), ran.append)
    assert len(ran) == 3 and ran[2] == [*ran[0][:-4], "--answer-url", "http://h:2"]
    for urls, names, problem in (
        ([("gpt-5", "u")], [], r"--answer-url gpt-5=u: arena has no such model here; choose from gpt-4o, o1"),
        ([], [("o1", "x")], r"--answer-model o1=\.\.: give --answer-url o1=URL with it"),
        (
            [("gpt-4o", "u"), ("o1", "v")],
            [("gpt-4o", "o1")],
            r"--answer-model: gpt-4o and o1 are both called o1; run them separately",
        ),
    ):
        with pytest.raises(UserError, match=problem):
            servers_of(manifest, urls, names, [])
    # A model's folder with the same name as a model of a server is no server.
    served = ServedModel("http://h:1", "models/Qwen2.5-7B-Instruct")
    assert served.flags(["eval", "--answer-model", served.model, "--limit", "2"]) == ["--answer-url", "http://h:1"]
    for words in (["eval", "--model"], ["extract", "--agent-model"], ["train"]):
        assert served.flags([*words, served.model]) == []


@pytest.mark.parametrize(
    "flags",
    [
        ("--answer-url", "gpt-4o=http://h:1"),
        ("--answer-model", "gpt-4o=x"),
        ("--allow-key", "KEY@h"),
        ("--answer-url", "gpt-4o=http://h:1", "--allow-key", "KEY@h", "--set", "judge.url=http://h:1"),
    ],
)
def test_in_the_world_flags_of_a_server_are_refused(
    flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "reproduce", lambda *given: {})
    judge = ("--set", "judge.url=http://h:1")
    for words, status in ((flags, 2), (("--allow-key", "KEY@h", *judge), 0)):
        assert cli.run(["reproduce", "arena", "F2", *words]) == status
    said = f"{flags[0]}: the invented world has no model of a server; give it with --scale paper"
    assert capsys.readouterr().err.count(said) == 1


@pytest.mark.usefixtures("asked_file")
def test_what_another_model_of_the_server_answered_is_refused(run_command: Callable[[list[str]], None]) -> None:
    def answered_by(name: str) -> None:
        servers = servers_of(read_manifest("arena"), [("gpt-4o", "http://h:1")], [("gpt-4o", name)], [])
        reproduce("arena", ["T5"], Scale("paper", servers=servers), Path("out"), run_command)

    answered_by("one")
    answered_by("one")
    with pytest.raises(UserError, match=r"gpt_4o-hotpotqa-seed0: was made with --answer-model=one, but now there"):
        answered_by("other")


def test_an_agent_of_a_server_reads_what_an_extractor_of_ours_leaves(tmp_path: Path) -> None:
    manifest = read_manifest("eviomni")
    scale = Scale("paper", servers={"search-r1-32b": ServedModel("http://h:1", "big", "KEY")})
    *_, alone, with_eviomni = experiments(manifest, "T5", scale, tmp_path)
    (answering,), (extraction,) = alone.columns["nq"], with_eviomni.columns["nq"]
    asked, read = " ".join(answering.to_run(scale)), " ".join(extraction.to_run(scale))
    assert asked.startswith("eval --answer-model big --set")
    assert asked.endswith("--answer-url http://h:1 --answer-key-env KEY")
    assert "--loop agentic --agent-name big" in read and "retrieval.k=3" in extraction.words
    assert read.endswith("--agent-url http://h:1 --key-env KEY")
    assert "search-r1-32b" not in alone.lacking() | with_eviomni.lacking()
    *_, with_eviomni = experiments(manifest, "T5", PAPER, tmp_path)
    assert "search-r1-32b" in with_eviomni.lacking()


@pytest.mark.parametrize("table", ["T5", "T6"])
def test_an_agent_has_the_same_limits_with_and_without_an_extractor(table: str, tmp_path: Path) -> None:
    """Those of Search-R1's preset; of several overrides of a key the last counts."""
    cells = experiments("eviomni", table, PAPER, tmp_path)
    words = [command.words for cell in cells for (command,) in cell.columns.values()]
    limits = [dict(word.split("=") for word in one if word.startswith("rollout.")) for one in words]
    preset = read_run_recipe(RECIPES / "search_r1" / "qwen2.5-3b.toml", []).rollout
    keys = ("max_turn_tokens", "max_policy_tokens", "max_context", "max_passage_tokens")
    assert {one[0] for one in words} == {"eval", "extract"}
    assert all(one == {f"rollout.{key}": str(getattr(preset, key)) for key in keys} for one in limits)


def test_a_filter_is_tuned_on_questions_and_its_evidence_answered_from(tmp_path: Path) -> None:
    manifest = read_manifest("eviomni")
    invented = f"{tmp_path}/world/data/given_train.jsonl"
    for scale, questions in ((PAPER, "data/nq_train.jsonl"), (WORLD, invented)):
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
    room = int(words.partition("rollout.max_turn_tokens=")[2].partition(" ")[0])
    assert room >= cli.build_parser().parse_args(list(made)).max_tokens + 128  # an analysis, relevance and answer
    on_cpu = (
        experiment_of(manifest, "T3", method, Scale("paper", overrides=("model.device=cpu",)), tmp_path).before[0].words
    )
    assert [words[words.index("--device") + 1] for words in (made, on_cpu)] == ["cuda", "cpu"]


@pytest.mark.parametrize("scale", [PAPER, WORLD], ids=["paper", "world"])
def test_arenas_control_differs_from_arena_in_the_reward_alone(scale: Scale, tmp_path: Path) -> None:
    trainings = {}
    for method in ("arena", "arena_control"):
        cell = experiment_of(read_manifest("arena"), "F2", method, scale, tmp_path)
        command = cell.before[-1]
        trainings[method] = {word for word in command.words if word != str(command.folder)}
    assert trainings["arena_control"] - trainings["arena"] == {"system.options.relevance_reward=false"}
    assert trainings["arena"] <= trainings["arena_control"]


def test_whoever_reads_many_passages_has_room_for_them(tmp_path: Path) -> None:
    """MuSiQue's 20 paragraphs are 2,454 tokens on average. An extractor that is trained on 5 passages reads them all;
    LLMLingua-2 leaves 540 of them, which the generator is shown whole."""
    manifest, room = read_manifest("eviomni"), "rollout.max_passage_tokens=3072"
    scale = Scale("paper", overrides=("rollout.max_passage_tokens=5000",))
    for table in ("T1", "T2_7B", "T3", "T4", "T10", "tau", "gamma", "own"):
        for cell in experiments(manifest, table, scale, tmp_path):
            for words in (command.words for command in cell.every()):
                prompted = words[0] == "extract" and not {"recomp", "llmlingua-2"} & set(words)
                assert (room in words) == prompted, words
                assert not prompted or words.index(room) < words.index(scale.overrides[0])  # the last one counts
    invented = experiment_of(manifest, "F5", "eviomni", WORLD, tmp_path)
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


def test_of_several_seeds_the_seed_is_the_unit() -> None:
    """The number of questions does not matter: Eval-RAR's .022, .007 and .127 over Search-R1 are three values."""

    def seeds(*right: int) -> dict[int, dict[str, float]]:
        return {seed: {str(n): float(n < count) for n in range(134)} for seed, count in enumerate(right)}

    first, second = seeds(103, 133, 96), seeds(106, 134, 113)
    found = _figures(second, first)
    assert (
        found["p"] == 0.25
        and _p(found) == "0.25"
        and (found["over"], found["test"])
        == (
            "seeds",
            "exact sign flip test over seeds",
        )
    )
    assert found["differences"] == pytest.approx([3 / 134, 1 / 134, 17 / 134]) and found["difference"] == pytest.approx(
        7 / 134
    )
    # Student's interval: s = sqrt(76) / 134, t = 4.303 with two degrees of freedom.
    half = 4.303 * 76**0.5 / 134 / 3**0.5
    assert (found["low"], found["high"]) == pytest.approx((7 / 134 - half, 7 / 134 + half))
    # EviNote's + NS, .231, .007 and -.716: no pattern of signs has a smaller sum.
    assert _figures(seeds(134, 134, 0), first)["p"] == 1.0
    # Seeds are paired by their number, in whatever order they ran; a row without seeds is paired with every one.
    assert _figures(second, dict(reversed(first.items()))) == found
    alone = _figures({0: first[0]}, second, fixed=True)
    assert alone["differences"] == pytest.approx([-3 / 134, -31 / 134, -10 / 134]) and alone["over"] == "seeds"
    # The only finished seed of three is not such a row.
    assert _figures({1: first[1]}, second)["over"] == "questions"
    assert "p" not in _figures(seeds(1, 2), {5: first[0], 6: first[1]})


def test_a_table_names_the_models_below_their_gate(tmp_path: Path) -> None:
    manifest = read_manifest("eval_rar")
    cells = experiment_runs(manifest, manifest.tables["T1"], Scale("world", (0, 1)), tmp_path)
    for name, copied in (("base0", 0.98), ("base1", 0.16)):
        folder = tmp_path / "world" / name
        folder.mkdir(parents=True)
        record = {"gate": 0.97, "passed": copied >= 0.97, "names copied right": copied}
        (folder / "sft.json").write_text(json.dumps(record))
    results = results_of(manifest, manifest.tables["T1"], Scale("world", (0, 1)), cells)
    assert results["below_gate"] == ["base1 (16% of names copied right, gate 97%)"]
    assert markdown(results).endswith(f"ended below their gate: {results['below_gate'][0]}.\n")


def test_a_row_that_no_seed_changes_stands_beside_every_seed_and_an_unfinished_one_does_not(tmp_path: Path) -> None:
    manifest, scale = read_manifest("eval_rar"), Scale("paper", (0, 1, 2))
    cells = experiment_runs(manifest, manifest.tables["T1"], scale, tmp_path)
    right = {("direct", 0): 1, ("search_r1", 0): 3, ("search_r1", 1): 5, ("search_r1", 2): 7, ("eval_rar", 0): 9}
    for cell in cells:
        untrained = cell.row.method == "direct"
        if (count := right.get((cell.row.method, cell.seed))) is None or not (untrained or cell.row.model == "base"):
            continue
        folder = cell.columns["nq"][0].folder
        folder.mkdir(parents=True)
        records = [
            {"id": str(n), "question": "?", "parts": {}, "measures": {"em": float(n < count)}} for n in range(10)
        ]
        (folder / "trajectories.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        (folder / "metrics.json").write_text("{}")
    results = results_of(manifest, manifest.tables["T1"], scale, cells)
    ours = {row["label"]: row["ours"]["em"]["nq"] for row in results["rows"] if row["ours"]}
    direct, unfinished = ours["Direct inference"], ours["Eval-RAR (base)"]
    assert direct["differences"] == pytest.approx([-0.2, -0.4, -0.6]) and (direct["p"], direct["over"]) == (
        0.25,
        "seeds",
    )
    assert unfinished["differences"] == pytest.approx([0.6]) and unfinished["over"] == "questions"
    page = markdown(results)
    assert "over 3 seeds in pairs; with 3 seeds no p is below 0.25." in page and "| .900 | 0.0312 † |" in page


def test_one_seed_is_compared_over_its_questions_and_marked() -> None:
    row, other = {str(n): 1.0 + n for n in range(200)}, {str(n): 0.0 for n in range(200)}
    found = _figures({0: row}, {0: other})
    assert _p(found) == "≤ 0.0001 †" and found["over"] == "questions" and found["differences"] == [100.5]


def test_in_the_world_what_asks_for_no_notes_has_a_prompt_without(tmp_path: Path) -> None:
    manifest = read_manifest("evinote")
    for method, prompt in (("base", "search_r1"), ("ns", "evinote"), ("sen_eqr", "evinote")):
        words = experiment_of(manifest, "T5", method, WORLD, tmp_path).before[-1].words
        assert f"system.template={tmp_path}/world/{prompt}.txt" in words and "system.name=evinote" in words


def test_arenas_rows_start_from_a_base_that_names_numbers(tmp_path: Path) -> None:
    for paper, table, folder, passages in (
        ("arena", "F2", "numbered1", NUMBERED_FORMAT),
        ("evinote", "T5", "base1", ""),
    ):
        manifest = read_manifest(paper)
        for cell in experiments(manifest, table, Scale("world", (1,)), tmp_path):
            *_, base, training = cell.before
            assert base.folder == tmp_path / "world" / folder and f"model.path={base.folder}" in training.words
            assert not passages or f'retrieval.passage_format="{passages}"' in training.words


def test_of_two_rows_what_each_recalls_alone(tmp_path: Path) -> None:
    """Both recall one of four questions with a gold passage; a seed that only one row has does not count."""
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
