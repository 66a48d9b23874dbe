"""How wide our kernels load and store, by the rows of `thresher bench compile`: 16 bytes a thread where the bulk is."""

from collections import Counter
from typing import Any

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

VOCABULARY = 151_665  # the trainer's, an odd number

# Beside vectors: the block and slot of a row, an element of dw, and a program's part of it, written once.
SINGLE = {"rope": {"loads 4": 2}, "norm's dw": {"stores 2": 1}, "heads' norm's gradient": {"stores 4": 2}}


def of_modules(ours: Any, *modules: str) -> dict[tuple[str, str], Any]:
    return {key: row for key, row in ours.rows.items() if row["module"].rpartition(".")[2] in modules}


def accesses(row: Any, *kinds: str) -> Counter[str]:
    """ "loads 16" -> how many instructions of all the code load so many bytes, and so on."""
    found: Counter[str] = Counter()
    for part in ("prologue", "loop", "epilogue"):
        for kind in kinds:
            found.update({f"{kind} {width}": count for width, count in row["code"][part][kind].items()})
    return found


def test_a_layers_kernels_load_and_store_16_bytes(ours: Any) -> None:
    rows = of_modules(ours, "gate_triton", "heads_triton", "norm_triton", "rope_triton")
    assert len(rows) > 40
    for (name, target), row in rows.items():
        found = accesses(row, "loads", "stores")
        vectors = {access: found.pop(access, 0) for access in ("loads 16", "stores 16")}
        kernel = name.partition(" bf16")[0].partition(" fp32")[0]
        assert found == ({} if name.endswith("no dw") else SINGLE.get(kernel, {})), (name, target)
        assert vectors["loads 16"] > 0 and (vectors["stores 16"] > 0 or kernel == "norm's dw"), (name, target)


def test_exponentials_are_stored_in_whole_vectors(ours: Any) -> None:
    """At the trainer's vocabulary, whose rows are padded for it."""
    rows = of_modules(ours, "coefficients_triton", "head_triton", "persistent_triton")
    stores = {
        key: accesses(row, "stores")
        for key, row in rows.items()
        if key[0] == "entropy gradient"
        or (row["constants"].get("V") == VOCABULARY and row["constants"]["H"] == 1536 and " bf16 " in key[0])
    }
    kernels = (f"head bf16 V {VOCABULARY:,} H 1,536", f"again bf16 V {VOCABULARY:,} H 1,536", "entropy gradient")
    names = {(kernel, target) for kernel in kernels for target in ("sm_80", "sm_90")}
    assert stores.keys() == names | {(f"persistent {kernels[0]}", "sm_90")}
    for (name, target), found in stores.items():
        assert found.pop("stores 16") >= 4 and not found["stores 2"], (name, target)
        # m, s and u of a row, y of each half of a tile
        assert found.total() <= (5 if "head" in name else 0), (name, target, found)


def test_keys_and_values_come_in_16_bytes(ours: Any) -> None:
    """Into shared memory, while others are computed with; what else a step loads are places of blocks."""
    rows = of_modules(ours, "decode_triton", "cascade_triton", "prefill_triton")
    reading = {key: row["code"]["loop"] for key, row in rows.items() if not key[0].startswith("merge")}
    assert len(reading) > 30
    for key, loop in reading.items():
        assert loop["copies"].keys() == {"16"}, key
        assert loop["loads"].keys() == {"4", "16"} and loop["loads"]["16"] == loop["copies"]["16"], key
        assert loop["stores"] == {}, key
