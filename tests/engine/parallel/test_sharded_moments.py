"""Test that each of several ranks takes the rows of its weights from the moments that one process has saved."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_model
from torch import nn

from thresher.engine.config.sections import OptimSection
from thresher.engine.optim.master_weights import make_optimizer, step_optimizer
from thresher.engine.parallel.ranks import Ranks
from thresher.engine.parallel.sharded_weights import ShardedWeights, rows_of
from thresher.engine.store.checkpoint import save_checkpoint
from thresher.engine.training.update import Updater

ROWS, COLUMNS = 5, 300  # 8-bit moments of a row have two blocks


class Saved(nn.Linear):
    def save(self, path: Path) -> None:
        save_model(self, str(path / "model.safetensors"))


@pytest.mark.parametrize("count", [2, 4])  # with four ranks, one has no row
@pytest.mark.parametrize("moments", ["float32", "8bit"])
def test_each_rank_takes_its_rows_of_the_moments(tmp_path: Path, moments: Any, count: int) -> None:
    optim = OptimSection(optimizer_state_dtype=moments)
    torch.manual_seed(0)
    whole = Saved(COLUMNS, ROWS)
    optimizer = make_optimizer(whole, optim, 0.1)
    for _ in range(3):
        whole(torch.randn(4, COLUMNS)).square().sum().backward()
        step_optimizer(optimizer, 0.1)
    path = save_checkpoint(tmp_path, 3, whole, optimizer, {})
    found: list[dict[str, torch.Tensor]] = []
    for rank in range(count):
        ranks = Ranks(rank, count)
        mine = nn.ParameterDict(
            {name: value.detach()[rows_of(ROWS, ranks)] for name, value in whole.named_parameters()}
        )
        ours = make_optimizer(mine, optim, 0.1)
        all_rows = SimpleNamespace(sharded=dict(whole.named_parameters()), ranks=ranks)
        weights = SimpleNamespace(module=mine, rows_here=partial(ShardedWeights.rows_here, all_rows))
        Updater.load_moments(SimpleNamespace(weights=weights, optimizer=ours), path)
        found.append({f"{name}.{what}": x for name in mine for what, x in ours.state[mine[name]].items()})
    expected = {f"{n}.{what}": x for n, p in whole.named_parameters() for what, x in optimizer.state[p].items()}
    assert len(expected) == (8 if moments == "8bit" else 6)
    for name, state in expected.items():
        parts = [part[name] for part in found]
        if state.dim():
            assert torch.equal(torch.cat(parts), state), name
        else:
            assert [*parts, state] == [3.0] * (count + 1), name
