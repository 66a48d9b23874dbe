"""AdamW with its moments in CPU memory or in 8 bits, against torch's and float64; its checkpoints."""

from pathlib import Path

import pytest
import torch
from torch import nn

from thresher.common.errors import UserError
from thresher.engine.config.sections import OptimSection
from thresher.engine.optim import adamw as module
from thresher.engine.optim.adamw import PartwiseAdamW
from thresher.engine.optim.master_weights import make_optimizer
from thresher.engine.store.checkpoint import load_optimizer, save_checkpoint

LARGE, SMALL = (17, 300), (11,)  # two blocks per row, the second of which is not full


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.large = nn.Parameter(torch.randn(LARGE, generator=generator))
        self.small = nn.Parameter(torch.randn(SMALL, generator=generator))
        self.unused = nn.Parameter(torch.ones(3))

    def save(self, path: Path) -> None:
        torch.save(self.state_dict(), path / "weights.pt")


def gradients(weights: Weights, step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in (weights.large, weights.small):
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def trained(optim: OptimSection, steps: int = 6) -> tuple[Weights, torch.optim.Optimizer]:
    weights = Weights()
    optimizer = make_optimizer(weights, optim, 0.01)
    for step in range(steps):
        gradients(weights, step)
        optimizer.step()
    return weights, optimizer


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def stored(state: dict[str, torch.Tensor], name: str, signed: bool) -> torch.Tensor:
    return module.dequantise(state[name], state[f"{name}_scale"], signed)


def test_what_a_recipe_gets() -> None:
    assert type(trained(OptimSection(), 0)[1]) is torch.optim.AdamW
    # Masters in CPU memory are stepped there by torch's own AdamW; only the moments can be moved there alone.
    assert type(trained(OptimSection(offload="masters"), 0)[1]) is torch.optim.AdamW
    elsewhere = make_optimizer(nn.Linear(2, 2, device="meta"), OptimSection(offload="moments"), 0.1)
    assert isinstance(elsewhere, PartwiseAdamW) and elsewhere.storage == torch.device("cpu")


@pytest.mark.parametrize("values", [1 << 22, 700])
def test_moments_in_cpu_memory_have_the_bits_of_torchs(values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AT_A_TIME", values)
    settings = {"weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6}
    plain, optimizer = trained(OptimSection(**settings))
    moved, partwise = trained(OptimSection(**settings, offload="moments"))
    assert isinstance(partwise, PartwiseAdamW) and same(plain, moved)
    for parameter, other in zip(plain.parameters(), moved.parameters(), strict=True):
        states = optimizer.state.get(parameter, {}), partwise.state.get(other, {})
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert moved.unused not in partwise.state


def test_8_bits_are_torchs_up_to_the_tables_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"betas": (0.9, 0.9), "weight_decay": 0.1}
    plain, optimizer = trained(OptimSection(**settings), 1)
    coarse, eight = trained(OptimSection(**settings, optimizer_state_dtype="8bit"), 1)
    assert same(plain, coarse), "the first step takes exact moments"
    plain, optimizer = trained(OptimSection(**settings))
    coarse, eight = trained(OptimSection(**settings, optimizer_state_dtype="8bit"))
    assert isinstance(eight, PartwiseAdamW)
    assert torch.equal(plain.small, coarse.small) and not torch.equal(plain.large, coarse.large)
    state, truth = eight.state[coarse.large], optimizer.state[plain.large]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.uint8
    assert sum(x.nbytes for x in state.values()) < 0.26 * sum(x.nbytes for x in truth.values())
    assert eight.state[coarse.small]["exp_avg"].dtype == torch.float32
    states = [trained(OptimSection(**settings, optimizer_state_dtype="8bit"), steps) for steps in range(1, 7)]
    for name, signed in module.MOMENTS:
        *_, found = moments = [stored(each.state[weights.large], name, signed) for weights, each in states]
        # Half a step of the table each time, half of that on average, decayed by a beta of .9: six of them make 4.7.
        half = (0.45 / 64 if signed else 0.45 / 128) * max(float(moment.abs().max()) for moment in moments)
        error = (found - truth[name]).abs()
        assert 0 < float(error.max()) <= 4.7 * half  # bound: sums of half a step of the largest of any step
        assert float(error.mean()) <= 2.35 * half
    parts = trained(OptimSection(**settings, optimizer_state_dtype="8bit", offload="moments"))[0]
    assert same(coarse, parts)
    monkeypatch.setattr(module, "AT_A_TIME", 700)  # two rows
    assert same(coarse, trained(OptimSection(**settings, optimizer_state_dtype="8bit"))[0])


@pytest.mark.parametrize("optim", [OptimSection(optimizer_state_dtype="8bit"), OptimSection(offload="moments")])
def test_a_checkpoint_goes_on_to_the_same_bits(tmp_path: Path, optim: OptimSection) -> None:
    whole, _ = trained(optim, 6)
    half, optimizer = trained(optim, 3)
    path = save_checkpoint(tmp_path, 3, half, optimizer, {})
    resumed = Weights()
    resumed.load_state_dict(half.state_dict())
    again = make_optimizer(resumed, optim, 0.01)
    load_optimizer(path, again, resumed.named_parameters())
    for step in range(3, 6):
        gradients(resumed, step)
        again.step()
    assert same(whole, resumed)


def test_moments_of_another_kind_are_refused(tmp_path: Path) -> None:
    kinds = [OptimSection(optimizer_state_dtype="8bit"), OptimSection()]
    for saved, wanted in (kinds, kinds[::-1]):
        weights, optimizer = trained(saved, 1)
        path = save_checkpoint(tmp_path, 1, weights, optimizer, {})
        other = make_optimizer(weights, wanted, 0.01)
        with pytest.raises(UserError, match=r"optim\.optimizer_state_dtype, that it was saved with"):
            load_optimizer(path, other, weights.named_parameters())
    # Float32 moments are the same wherever they are stored.
    load_optimizer(path, make_optimizer(weights, OptimSection(offload="moments"), 0.01), weights.named_parameters())


def test_an_8_bit_step_is_float64s_from_the_moments_that_are_stored() -> None:
    """At the third step, weights are exact up to float32 rounding, and moments up to half a step of the table."""
    lr, beta1, beta2, eps, decay = 0.01, 0.75, 0.9375, 1e-2, 0.1  # betas that float32 represents exactly
    optim = OptimSection(betas=(beta1, beta2), eps=eps, weight_decay=decay, optimizer_state_dtype="8bit")
    weights, optimizer = trained(optim, 2)
    state = optimizer.state[weights.large]

    def moments() -> list[torch.Tensor]:
        return [stored(state, name, signed).double() for name, signed in module.MOMENTS]

    (m, v), w = moments(), weights.large.detach().double()
    gradients(weights, 2)
    g = weights.large.grad.double()
    optimizer.step()
    error_of_m = 3 * 2**-24 * (m.abs() + g.abs())  # three roundings, of terms that may cancel
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g.square()
    rate = lr / (1 - beta1**3) / ((v / (1 - beta2**3)).sqrt() + eps)
    error = (weights.large.detach().double() - (w * (1 - lr * decay) - rate * m)).abs()
    rounding = 2**-24 * (3 * w.abs() + 10 * rate * m.abs()) + rate * error_of_m
    assert bool((error <= rounding).all())  # bound: a decay, a difference; constants, roots, a division, products
    rounded = error_of_m + 2**-23 * m.abs(), 2**-21 * v  # the product of table value and scale rounds twice
    for moment, found, half, slack in zip((m, v), moments(), (0.45 / 64, 0.45 / 128), rounded, strict=True):
        for columns in (slice(0, 256), slice(256, 300)):
            largest, of_rounding = (x[:, columns].abs().amax(1, keepdim=True) for x in (moment, slack))
            error = (found - moment)[:, columns].abs()
            assert bool((error <= half * largest + 2 * of_rounding).all())  # bound: half a step of the table
