"""A plan of several GPUs accepts and offers what one GPU does; what lies beside a GPU is divided among them, too."""

from pathlib import Path
from typing import Any

import pytest

from thresher.bench.roofline import MODELS
from thresher.engine.assemble import read_run_recipe
from thresher.engine.planning.memory import head_weights
from thresher.engine.planning.plan import GB, Plan, plan

ARENA = Path(__file__).parents[3] / "recipes" / "arena" / "qwen2.5-7b.toml"


def planned(gpus: int, *changes: str, **options: Any) -> Plan:
    return plan(MODELS["7B"], read_run_recipe(ARENA, list(changes)), gpus, **options)


@pytest.mark.parametrize("change", ["optim.offload=masters", "optim.offload=moments", "grpo.reference=cpu"])
def test_what_lies_in_the_machines_memory_is_each_ranks_share(change: str) -> None:
    one, four = planned(1, change), planned(4, change)
    assert one.host and one.host.keys() == four.host.keys()
    for name, size in one.host.items():
        assert four.host[name] == size // 4, name


def test_masters_elsewhere_leave_the_heads_gradient_on_the_device() -> None:
    """The loss adds to it there, whole, whatever the number of ranks."""
    for gpus in (1, 4):
        parts = planned(gpus, "optim.offload=masters").phases["loss"]
        assert parts["gradients"] == 4 * head_weights(MODELS["7B"]) and parts["masters"] == parts["moments"] == 0


def test_two_small_gpus_are_offered_what_one_is() -> None:
    found = planned(2, memory_bytes=40 * GB)
    assert not found.fits
    assert any('optim.offload = "masters"' in line for line in found.advice), found.advice
    assert not any("sharded over" in line for line in found.advice)
