"""Tests of the pages that reproduce a paper's tables: each names everything in its manifest and makes it with the
manifest's commands, and its plans are the planner's."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
from documents import ROOT, blocks, commands, links, read, table_rows

from thresher.bench.roofline import MODELS, QWEN35
from thresher.bench.studies.methods import read_comparison, recipe_of, runs_of
from thresher.cli.main import build_parser
from thresher.engine.assemble import read_run_recipe
from thresher.engine.planning.plan import plan
from thresher.engine.planning.time import CHIPS, GB
from thresher.engine.reproduce.manifest import paper_names, read_manifest
from thresher.engine.reproduce.pipelines import Scale, experiment_runs
from thresher.retrieval.datasets.convert import parse_mix

PAGES = {name: f"docs/reproduce/{name}.md" for name in paper_names()} | {"lear": "docs/reproduce/eviomni.md"}
HOUR = 3600.0


@pytest.mark.parametrize("name", paper_names())
def test_a_page_names_what_its_manifest_asks_for(name: str) -> None:
    manifest, text = read_manifest(name), "\n".join([*read(PAGES[name]), *read("docs/reproduce.md")])
    asked = [model.paper for model in manifest.models.values()] + [column.paper for column in manifest.sets.values()]
    missing = [path for path in (*asked, *manifest.files) if path not in text and f'"{Path(path).stem}"' not in text]
    assert not missing, f"{PAGES[name]}: not a word of {', '.join(missing)}"
    tables = "\n".join(line for line in read(PAGES[name]) if line.startswith(("|", f"    thresher reproduce {name} ")))
    assert [table for table in manifest.tables if not re.search(rf"\b{table}\b", tables)] == []


@pytest.mark.parametrize("name", paper_names())
@pytest.mark.fast_cases(2)
def test_a_page_makes_its_files_as_the_manifest_says(name: str) -> None:
    """The flags are the same, except for the names of input files."""
    manifest = read_manifest(name)
    shown = [command.words for page in (PAGES[name], "docs/reproduce.md") for command in commands(page)]
    typed = dict(map(made_by, filter(lambda words: " ".join(words[:2]) in ("data convert", "index build"), shown)))
    ways = [*manifest.files.values(), *(column.get for column in manifest.sets.values())]
    said = [words for way in ways for words in re.findall(r"thresher ((?:data convert|index build) .*?--out \S+)", way)]
    assert said
    for out, flags in (made_by(words.split()) for words in said):
        assert typed[out] == flags, f"{PAGES[name]}: {out}"


def made_by(words: Sequence[str]) -> tuple[str, dict[str, object]]:
    """Return the output path of a command, and its flags."""
    flags = vars(build_parser().parse_args(words))
    del flags["handler"]  # a function, which every parser creates anew
    read = {key: flags.pop(key, None) is not None for key in ("files", "aliases", "corpus", "encoder")}
    mixed = [(source.name, source.count) for source in map(parse_mix, flags.pop("mix", None) or ())]
    return flags["out"], flags | read | {"mix": mixed}


def test_every_page_is_linked() -> None:
    linked = {target.partition("#")[0] for _, target in links("docs/reproduce.md")}
    assert {page.removeprefix("docs/") for page in PAGES.values()} <= linked


@pytest.mark.parametrize(
    ("page", "row"),
    [
        pytest.param(page, row, id=f"{Path(page).stem}-{number}")
        for page in sorted(set(PAGES.values()))
        for number, row in enumerate(table_rows(page, "recipe"))
    ],
)
def test_a_plan_on_a_page_is_the_plan(page: str, row: list[str]) -> None:
    recipe, size, override, machine, memory, seconds, hours = (cell.strip("`") for cell in row)
    gpus, chip = machine.split()
    loaded = read_run_recipe(ROOT / "recipes" / recipe, [] if override == "-" else [override])
    rates = CHIPS[chip]
    found = plan(MODELS[size], loaded, gpus=int(gpus), memory_bytes=int(rates.memory), rates=rates)
    step = found.seconds_per_step
    assert found.fits and step is not None
    stated = [f"{found.total_bytes / GB:.1f}", f"{step:.0f}", f"{step * loaded.run.steps / HOUR:.1f}"]
    assert [memory, seconds, hours] == stated, f"{page}: {row}"


@pytest.mark.parametrize("row", table_rows("docs/comparisons.md", ""), ids=lambda row: row[0])
def test_a_plan_of_the_comparison_at_paper_scale_is_the_plan(row: list[str], tmp_path: Path) -> None:
    comparison = read_comparison(ROOT / "bench/studies/comparisons/paper.toml")
    name, methods = row[0].split(", ")
    model, rates = (MODELS | QWEN35)[name.removeprefix("Qwen2.5-")], CHIPS["H100"]
    # LLDS takes longer by its guard's second pass of the head, of which the text says the seconds.
    chosen = ["search_r1_reinforce"] if methods == "REINFORCE" else ["search_r1", "gigpo", "igpo", "tree_grpo"]
    recipes = [
        recipe
        for run in runs_of(comparison)
        if (run.seed, run.control) == (0, False)
        and run.method in chosen
        and f"models/{name}" == (recipe := recipe_of(comparison, tmp_path, run)).model.path.removesuffix("-Instruct")
    ]
    assert len(recipes) == 2 * len(chosen)  # over two corpora
    for recipe in recipes:
        found = plan(model, recipe, memory_bytes=int(rates.memory), rates=rates)
        assert found.fits and found.seconds is not None and found.seconds_per_step is not None
        stated = f"{found.seconds['rollout']:.0f} + {found.seconds['update']:.0f}"
        assert row[1:] == [f"{found.total_bytes / GB:.1f} GB", stated, f"{found.seconds_per_step * 80 / HOUR:.1f}"]


@pytest.mark.parametrize("page", sorted(set(PAGES.values())))
def test_a_training_of_several_gpus_is_one_of_the_paper_s(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It uses the folder in which `reproduce` looks for it, and the same words, except for a server."""
    monkeypatch.chdir(ROOT)
    text = "\n".join(block.text for block in blocks(page)).replace("\\\n", " ")
    words = next(shlex.split(line) for line in text.splitlines() if line.startswith("torchrun"))
    typed = build_parser().parse_args(words[words.index("train") :])
    read_run_recipe(typed.recipe, typed.set)
    manifest, out = read_manifest(Path(page).stem), Path(typed.out)
    cells = [
        cell
        for table in manifest.tables.values()
        for cell in experiment_runs(manifest, table, Scale("paper"), out.parents[1])
    ]
    [shown, *_] = [command.words for cell in cells for command in cell.before if command.folder == out]
    wanted = build_parser().parse_args(shown)
    assert Path(wanted.recipe).samefile(typed.recipe)
    assert set(wanted.set) == {one for one in typed.set if not one.startswith("retrieval.")}
