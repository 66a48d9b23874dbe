"""Tests of the pages of results: their tables are those of the stored rows."""

import json
from collections.abc import Sequence
from statistics import mean
from typing import Any

import pytest
from documents import ROOT, read

from thresher.bench.studies import methods
from thresher.bench.studies.systems import markdown
from thresher.engine.reproduce.tables import measure_table


def stored(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / "bench/results" / name).read_text().splitlines()]


CASES = [
    pytest.param(results, measure, id=f"{results['page']}-{results['table']}-{measure}")
    for results in stored("reproduce-world-cpu.jsonl")
    for measure in results["measures"]
    if any(row["ours"].get(measure) for row in results["rows"])
]


@pytest.mark.parametrize(("results", "measure"), CASES)
def test_a_table_of_a_page_is_that_of_the_stored_results(results: dict[str, Any], measure: str) -> None:
    cells = [cell for row in results["rows"] for cell in row["ours"].get(measure, {}).values()]
    assert all(cell["mean"] == pytest.approx(mean(cell["seeds"]), rel=1e-5, abs=1e-6) for cell in cells)
    lines, page = measure_table(results, measure), read(f"docs/results/{results['page']}.md")
    shown = [page[at : at + len(lines)] for at, line in enumerate(page) if line == lines[0]]
    assert lines in shown, "\n".join(lines)


@pytest.mark.parametrize(
    ("name", "page", "seeds"),
    [
        ("study-systems-cpu.jsonl", "docs/results.md", (0, 1, 2)),
        ("study-agents-cpu.jsonl", "docs/results/agents.md", (1, 2)),
    ],
)
def test_a_table_of_systems_is_that_of_the_stored_rows(name: str, page: str, seeds: Sequence[int]) -> None:
    rows, lines = [row for row in stored(name) if row["seed"] in seeds], read(page)
    table = markdown(rows).split("\n\n")[0].splitlines()
    assert lines[(start := lines.index(table[0])) : start + len(table)] == table


def test_the_table_of_smollm2_is_that_of_the_stored_rows() -> None:
    plan = methods.read_comparison("smollm2.toml")
    (found, _) = methods.markdown(plan, methods.analysis(plan, stored("study-smollm2-cpu.jsonl"))).split("## ")[1:]
    table, page = [line for line in found.splitlines() if line.startswith("|")], read("docs/results/credit.md")
    assert page[(start := page.index(table[0])) : start + len(table)] == table
