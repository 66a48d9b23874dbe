"""`thresher bench compile` on our kernels: none spills or outgrows a GPU, and each has its row."""

from typing import Any

import pytest

pytest.importorskip("triton")

from thresher.bench.compile import compiler
from thresher.bench.compile.target import TARGETS
from thresher.bench.machine import package_version
from thresher.kernels.registry import Specialisation, specialisations_of, triton_modules

pytestmark = pytest.mark.slow


def test_no_kernel_is_at_fault(ours: Any) -> None:
    assert (ours.status, ours.complaint) == (0, "")
    assert [row["faults"] for row in ours.rows.values() if row["faults"]] == []
    loops = {key: row["code"]["loop"] for key, row in ours.rows.items()}
    assert {key for key, loop in loops.items() if loop["spill_loads"] or loop["spill_stores"]} == set()


def listed() -> dict[tuple[str, str], Specialisation]:
    """What the modules list: (kernel, target) -> specialisation; no two share a pair."""
    entries = [entry for module in triton_modules() for entry in specialisations_of(module)]
    pairs = [
        ((entry.name, target.name), entry)
        for entry in entries
        for target in TARGETS.values()
        if target.capability in entry.capabilities
    ]
    assert len(dict(pairs)) == len(pairs) > 4
    return dict(pairs)


def test_every_listed_specialisation_has_a_row_for_each_of_its_targets_and_is_in_the_table(ours: Any) -> None:
    assert set(ours.rows) == set(listed())
    table = [line.split() for line in ours.said.splitlines()]
    for (_, target), row in ours.rows.items():
        code = row["code"]
        spills = [
            sum(code[part][name] for name in ("spill_loads", "spill_stores")) for part in ("prologue", "epilogue")
        ]
        shared = row["figures"]["static_shared"] + row["figures"]["dynamic_shared"]
        cells = [target[3:], row["figures"]["registers"], f"0+{sum(spills)}", -(-shared // 1024), row["blocks_per_sm"]]
        cells += [code[part]["instructions"] for part in ("prologue", "loop", "epilogue")]
        assert any(line[at : at + 8] == [str(cell) for cell in cells] for line in table for at in range(len(line)))


def test_matrix_instructions_are_where_they_are_meant_to_be_and_nowhere_else(ours: Any) -> None:
    found = {key: row["figures"]["matrix"] for key, row in ours.rows.items()}
    expected = {key: compiler.expected_matrix(entry, TARGETS[key[1]]) for key, entry in listed().items()}
    assert found == {key: [] if matrix is None else [matrix] for key, matrix in expected.items()}
    assert any(found.values())


def test_a_row_says_what_was_compiled_by_what(ours: Any) -> None:
    row = next(iter(ours.rows.values()))
    assert row["bench"] == "compile" and row["module"] == triton_modules()[0]
    assert row["triton"] == package_version("triton") and {"at", "commit", "machine", "torch"} <= row.keys()
    assert row["constants"] and row["num_warps"] and row["num_stages"]
