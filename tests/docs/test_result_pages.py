"""Tests of the pages of the invented world: their tables are those of the stored results."""

import json
from statistics import mean
from typing import Any

import pytest
from documents import ROOT, read

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
    assert all(cell["mean"] == pytest.approx(mean(cell["seeds"]), abs=1e-6) for cell in cells)
    lines, page = measure_table(results, measure), read(f"docs/results/{results['page']}.md")
    shown = [page[at : at + len(lines)] for at, line in enumerate(page) if line == lines[0]]
    assert lines in shown, "\n".join(lines)


def test_the_table_of_systems_is_that_of_the_stored_rows() -> None:
    lines, page = markdown(stored("study-systems-cpu.jsonl")).splitlines(), read("docs/results.md")
    assert lines == page[(start := page.index(lines[0])) : start + len(lines)]
