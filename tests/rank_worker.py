"""What one rank does in the tests of several: run as a script, once a process, with a file of scenarios.

    python rank_worker.py SCENARIOS PORT RANK

SCENARIOS: JSON, a list of {"name", "ranks", "recipe", "out", "resume", "mine": {rank: overrides}}, run one after the
other; a process whose rank is not below "ranks" sits a scenario out. What a scenario raises is written to
OUT.<rank>.error, as that is what a test looks at.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from thresher.engine.config.recipe import load_recipe
from thresher.engine.parallel import ranks as ranks_module
from thresher.engine.parallel.ranks import joined
from thresher.engine.training.train import train


def play(scenario: dict[str, Any], port: int, rank: int) -> None:
    """One scenario, in a process group of its own."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(scenario["ranks"]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    recipe = load_recipe(scenario["recipe"], scenario.get("mine", {}).get(str(rank), []))
    try:
        with joined() as ranks:
            train(recipe, scenario["out"], scenario.get("resume", False), ranks=ranks)
    except (Exception, SystemExit) as error:
        Path(f"{scenario['out']}.{rank}.error").write_text(f"{type(error).__name__}: {error}")
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    ranks_module._LAST_WORDS = 0.0
    scenarios, port, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]), int(sys.argv[3])
    for number, scenario in enumerate(scenarios):
        if rank < scenario["ranks"]:
            play(scenario, port + number, rank)
