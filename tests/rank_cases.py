"""Runs of several ranks in tests: processes over gloo that run scenarios (rank_worker.py), and a recipe for them."""

import json
import os
import random
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from train_cases import recipe_maker

from thresher.engine.config.recipe import Recipe

WORKER = Path(__file__).with_name("rank_worker.py")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
LR = 1e-2


def free_ports(count: int) -> list[int]:
    """Return free ports below the system's ephemeral range, because minutes may pass before the last one is used."""
    ports: list[int] = []
    for port in random.Random(os.getpid()).sample(range(15_000, 32_000), 1000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
        if len(ports) == count:
            break
    return ports


def small(base: dict[str, dict[str, Any]], **changes: dict[str, Any]) -> Recipe:
    lora: dict[str, dict[str, Any]] = {"lora": {}} if "lora" in changes else {}
    return recipe_maker(base | lora)(
        rollout={"questions_per_step": 4, "group_size": 3} | changes.pop("rollout", {}),
        optim={"lr": LR, "eps": LR, "warmup_ratio": 0.0, "micro_batch_tokens": 200} | changes.pop("optim", {}),
        run={"steps": 2, "save_every": 1, "eval_every": None} | changes.pop("run", {}),
        **changes,
    )


def play(folder: Path, scenarios: list[dict[str, Any]], killed: int | None = None) -> None:
    """Run the scenarios in order, with as many processes as the largest has ranks. killed: the rank that ends by
    SIGKILL, in the last scenario."""
    for each, port in zip(scenarios, free_ports(len(scenarios)), strict=True):
        each["port"] = port
    (folder / "scenarios.json").write_text(json.dumps(scenarios))
    ranks = range(max(each["ranks"] for each in scenarios))
    commands = [[sys.executable, "-P", str(WORKER), str(folder / "scenarios.json"), str(rank)] for rank in ranks]
    processes = [subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        said = [process.communicate(timeout=600)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [-9 if rank == killed else 0 for rank in ranks], said


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of two models, or two optimiser states, of the same names, shapes and dtypes."""
    assert {name: (x.shape, x.dtype) for name, x in one.items()} == {n: (x.shape, x.dtype) for n, x in other.items()}
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)
