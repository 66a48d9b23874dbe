"""Test `thresher study systems`: its runs, its refusals, and its report of made-up runs. Training is tested
elsewhere."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from thresher.bench.plots import draw_systems
from thresher.bench.studies.runs import check_folder, train_all
from thresher.bench.studies.systems import (
    CLAIMS,
    KNOWN,
    SYSTEMS,
    SystemRun,
    less_control,
    make_cases,
    make_world,
    markdown,
    measure,
    summary_of,
)
from thresher.cli.main import build_parser, run
from thresher.common.errors import UserError
from thresher.engine.config.recipe import Recipe
from thresher.engine.config.sections import DataSection, RetrievalSection, SystemSection
from thresher.engine.store.run_folder import sft_folder
from thresher.engine.systems import load_system
from thresher.engine.world.files import GIVEN, GIVEN_FORMAT, NUMBERED_FORMAT
from thresher.engine.world.stages import world_stages


@pytest.fixture
def cases(tmp_path: Path) -> list[SystemRun]:
    (tmp_path / "world").mkdir()
    return make_cases(tmp_path, SYSTEMS, [0, 1], {0}, ["run.steps=3"])


def test_every_system_gets_its_runs_and_its_own_world(cases: list[SystemRun]) -> None:
    first = [("search_r1", 0, False), ("search_r1", 0, True), ("search_r1", 1, False)]
    assert [(case.system, case.seed, case.control) for case in cases[:3]] == first
    assert len(cases) == 3 * len(SYSTEMS) and len({case.folder for case in cases}) == len(cases)
    for case in cases:
        recipe, given = case.recipe, case.system in GIVEN
        section = recipe.need(SystemSection)
        assert section.name == case.system and recipe.run.steps == 3 and recipe.run.seed == case.seed
        assert recipe.grpo.shuffle_rewards == case.control
        assert (recipe.need(RetrievalSection).index is None) == given == load_system(case.system, {}).given_passages
        assert Path(recipe.need(DataSection).train).name == ("given_train.jsonl" if given else "train.jsonl")
        assert Path(recipe.need(DataSection).dev or "").name == ("given_test.jsonl" if given else "test.jsonl")
        numbered = case.system == "arena"
        shown = NUMBERED_FORMAT if numbered else GIVEN_FORMAT if given else " {text}"
        assert recipe.need(RetrievalSection).passage_format == shown
        assert Path(recipe.model.path).name == f"{'numbered' if numbered else 'base'}{case.seed}"
        template = Path(section.template or "").read_text()
        assert template.startswith(f"{case.system}\n") and ("{passages}" in template) == given
        assert (recipe.judge.entailment is None) == (case.system != "evinote")
    # Two runs of a system differ either in the seed and the base that it selects, or in shuffling, and in nothing else.
    first, control, other = cases[:3]
    assert first.recipe.differences(control.recipe) == ["grpo.shuffle_rewards is false, not true"]
    differ = first.recipe.differences(other.recipe)
    assert [line.split()[0] for line in differ] == ["model.path", "run.seed"]


def test_systems_of_one_protocol_share_prompt_base_and_world(tmp_path: Path) -> None:
    (tmp_path / "world").mkdir()
    agents = ("search_r1", *(name for name in KNOWN if name not in SYSTEMS))
    cases = make_cases(tmp_path, agents, [4, 5], {4, 5}, ["grpo.updates_per_batch=2"], base=2)
    assert len(cases) == 4 * len(agents) > 4
    prompts, starts, presets = set(), set(), {}
    for case in cases:
        section = case.recipe.need(SystemSection)
        assert section.name == case.system
        prompts.add(Path(section.template or "").read_text())
        starts.add(case.recipe.model.path)
        presets[case.system] = case.recipe.grpo
    assert prompts == {"search_r1\nQuestion: {question}\n"} and starts == {str(tmp_path / "world" / "base2")}
    # Systems with Search-R1's own update and another protocol.
    alike = {name for name, grpo in presets.items() if grpo == presets["search_r1"]}
    assert alike == {"search_r1", "mem1", "zero_search"}, "two of them train alike"
    others = [str(grpo) for name, grpo in presets.items() if name not in alike]
    assert len(set(others)) == len(others) == len(agents) - 3
    typed: list[list[str]] = []
    make_world(tmp_path / "made", 2, agents, typed.append)
    folders = [Path(words[words.index("--out") + 1]).name for words in typed]
    assert folders == ["data", "index", "init2", "recite2", "base2"]


def test_the_worlds_commands_are_commands(tmp_path: Path) -> None:
    first, second = world_stages(tmp_path), world_stages(tmp_path, 1)
    assert [stage[0] for stage in first] == ["data", "index", "data", "init", "sft", "sft"]
    for stage in first:
        assert build_parser().parse_args(stage).out == stage[stage.index("--out") + 1]
    # Bases share the world and the judge, and nothing else.
    assert first[:3] == second[:3] and {stage[-1] for stage in first[3:]}.isdisjoint(stage[-1] for stage in second[3:])
    # A stage reads the output of an earlier one.
    assert f"model.path={first[4][-1]}" in first[5] and f"model.path={first[3][-1]}" in first[4]


def test_a_base_below_its_gate_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = {
        "init2": None,  # not fine-tuned
        "recite2": {"gate": None, "passed": True, "names copied right": None},
        "base2": {"gate": 0.97, "passed": False, "names copied right": 0.794},
    }

    def make(words: list[str]) -> None:
        folder = Path(words[words.index("--out") + 1])
        folder.mkdir(parents=True)
        if record := figures.get(folder.name):
            (folder / "sft.json").write_text(json.dumps(record))

    for _ in range(2):  # made, and made before
        make_world(tmp_path / "world", 2, ("naive_grpo",), make)
        said = capsys.readouterr().out.splitlines()[-1]
        assert said.endswith("ended below their gate: base2 (79% of names copied right, gate 97%)")


def test_a_world_holds_the_bases_that_its_systems_start_from(tmp_path: Path) -> None:
    def made(systems: tuple[str, ...]) -> list[str]:
        typed: list[list[str]] = []
        make_world(tmp_path / "world", 2, systems, typed.append)
        return [Path(words[words.index("--out") + 1]).name for words in typed]

    shared = ["data", "index", "init2", "recite2", "base2"]
    assert made(("naive_grpo",)) == shared
    assert made(("evinote", "arena"))[:6] == ["data", "index", "judge", *shared[2:]]
    assert made(("arena", "search_r1")) == made(("arena",)) and made(("arena",))[-1] == "numbered2"


def test_another_setting_in_the_folder_is_refused(cases: list[SystemRun]) -> None:
    case, other = cases[0], cases[1]
    case.folder.mkdir(parents=True)
    case.recipe.write(case.folder / "recipe.toml")
    check_folder(case)
    # otherwise short and long runs would be compared
    longer = replace(case, recipe=replace(case.recipe, run=replace(case.recipe.run, steps=4800)))
    with pytest.raises(UserError, match=r"other settings \(run\.steps is \d+, not 4800\)"):
        check_folder(longer)
    check_folder(longer, longer=True)
    other.recipe.write(case.folder / "recipe.toml")
    with pytest.raises(UserError, match=r"a study with other settings \(grpo.shuffle_rewards is true, not false\)"):
        check_folder(case)


def test_a_study_that_was_killed_goes_on(cases: list[SystemRun], monkeypatch: pytest.MonkeyPatch) -> None:
    """It resumes the interrupted run, and does not train finished ones again."""
    begun: list[tuple[Path, bool]] = []

    def train(recipe: Recipe, folder: Path, resume: bool, *_: Any, **__: Any) -> None:
        begun.append((folder, resume))
        folder.mkdir(parents=True, exist_ok=resume)
        if len(begun) == 2:
            raise KeyboardInterrupt
        (folder / "summary.json").touch()

    monkeypatch.setattr("thresher.bench.studies.runs.train", train)
    folders = [case.folder for case in cases[:3]]
    with pytest.raises(KeyboardInterrupt):
        train_all(cases[:3], "study", str)
    train_all(cases[:3], "study", str)
    assert begun == [(folders[0], False), (folders[1], False), (folders[1], True), (folders[2], False)]
    train_all(cases[:3], "study", str)
    assert len(begun) == 4


def test_a_world_that_was_killed_goes_on(tmp_path: Path) -> None:
    """It goes on with the interrupted stage, and resumes a fine-tuning with --resume."""
    world = tmp_path / "world"
    typed: list[list[str]] = []

    def run_command(words: list[str]) -> None:
        typed.append(words)
        into = Path(words[words.index("--out") + 1])
        if words[0] == "sft" and words[-1] != "--resume":
            sft_folder(into).mkdir(parents=True)
            raise KeyboardInterrupt
        into.mkdir(parents=True)

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            make_world(world, 0, ["search_r1"], run_command)
    make_world(world, 0, ["search_r1"], run_command)
    stages = world_stages(world, judged=False)
    assert [words[0] for words in stages] == ["data", "index", "init", "sft", "sft"]
    assert typed == [*stages[:4], [*stages[3], "--resume"], stages[4], [*stages[4], "--resume"]]
    make_world(world, 0, ["search_r1"], run_command)
    assert len(typed) == 7


def test_an_unknown_system_and_a_file_in_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["study", "systems", "--out", str(tmp_path / "s"), "--system", "lear"]) == 2
    assert "--system lear: the invented world has no form of it; choose from search_r1" in capsys.readouterr().err
    assert not (tmp_path / "s").exists()
    assert run(["study", "systems", "--out", str(tmp_path / "s"), "--seeds", "1", "2", "--controls", "0"]) == 2
    assert "--controls 0: expected one of --seeds, 1, 2; add it there" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert run(["study", "systems", "--out", str(tmp_path / "file")]) == 2


def test_a_judges_key_is_allowed_by_the_person_who_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[Any] = []

    def train(*_: Any, allow_keys: Any) -> None:
        allowed.append(allow_keys)
        raise UserError("no more")

    monkeypatch.setattr("thresher.bench.studies.systems.make_world", lambda world, *_: world.mkdir(exist_ok=True))
    monkeypatch.setattr("thresher.bench.studies.runs.train", train)
    assert run(["study", "systems", "--out", str(tmp_path / "s"), "--allow-key", "KEY@api.example.com"]) == 2
    assert allowed == [["KEY@api.example.com"]]


def records_of(case: SystemRun) -> list[dict[str, Any]]:
    """Return made-up metrics that rise with the step, but not in a control."""
    key = CLAIMS[case.system][0]

    def at(step: int) -> dict[str, Any]:
        value = 0.1 if case.control else 0.1 * (1 + step)
        parts = dict.fromkeys(("relevance", "format"), value)
        found = {**dict.fromkeys(("reward", "em", "f1"), value), "parts": parts}
        return found if key in parts else found | {key: value}

    sampled = {"em": 0.0, "sampled_tokens": 600}
    return [{"step": step, "eval": at(step)} if step % 2 == 0 else {"step": step, **sampled} for step in range(5)]


@pytest.mark.slow
def test_rows_table_and_picture(cases: list[SystemRun], tmp_path: Path) -> None:
    records = {case.name: records_of(case) for case in cases}
    for case in cases:
        case.folder.mkdir(parents=True)
        (case.folder / "summary.json").write_text(json.dumps({"seconds": 10.0 + case.seed}))
    rows = [summary_of(case, records[case.name]) for case in cases]
    arena = next(row for row in rows if row["name"] == "arena seed 1")
    assert (arena["em_before"], arena["relevance_before"]) == (0.1, 0.1)
    assert (arena["em_after"], arena["relevance_after"]) == (pytest.approx(0.5), pytest.approx(0.5))
    text = markdown(rows)
    assert len(text.splitlines()) == 2 + 2 * len(SYSTEMS)
    changed = "0.100 → 0.500"
    arena_row = f"| arena | 2 | {changed} | {changed} | 0.500, 0.500 | +0.400 | relevance {changed} | 2 | 1,200 | 10 |"
    assert arena_row in text
    assert "| arena, shuffled rewards | 1 | 0.100 → 0.100 |" in text
    draw_systems(rows, records, CLAIMS, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_system_is_held_against_its_control_seed_by_seed() -> None:
    def row(seed: int, em: float, control: bool = False) -> dict[str, Any]:
        known = {
            "system": "search_r1",
            "seed": seed,
            "control": control,
            "steps": 3,
            "sampled_tokens": 0,
            "seconds": 1.0,
        }
        return known | {f"{key}_{when}": em for key in ("em", "reward", "searches") for when in ("before", "after")}

    rows = [row(1, 0.9), row(0, 0.8), row(2, 1.0), row(3, 0.1)]
    controls = [row(0, 0.1, True), row(1, 0.3, True), row(2, 0.2, True)]  # .7, .6, .8 below
    found = less_control([*rows, *controls], "search_r1")
    assert found is not None and (found.count, found.p) == (3, 0.25)
    half = 4.303 * 0.1 / 3**0.5  # Student's t, two degrees of freedom
    assert (found.difference, found.low) == (pytest.approx(0.7), pytest.approx(0.7 - half))
    text = markdown([*rows, *controls])
    assert "| 0.900, 0.800, 1.000, 0.100 | +0.700 ± 0.248, 0.25 | searches" in text
    assert text.endswith("over seeds. With 3 seeds no p is below 0.25.\n")
    assert less_control(rows, "search_r1") is None and "| - | searches" in markdown(rows)


def test_a_measure_is_looked_for_in_two_places() -> None:
    assert measure({"em": 1.0, "parts": {"em": 0.5}}, "em") == 1.0
    assert measure({"parts": {"relevance": 0.5}}, "relevance") == 0.5
    assert measure({"parts": {}}, "compression") is None
