"""What computes an update's attention: chosen when the run is put together, called in every layer, or refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from backend_fakes import install
from model_cases import make_config

from thresher.common.errors import UserError
from thresher.engine.config.recipe import Recipe
from thresher.engine.config.sections import GrpoSection, OptimSection, SftSection
from thresher.engine.optim.master_weights import MasterWeights
from thresher.engine.packing import TrainSequence
from thresher.engine.training import update
from thresher.engine.training.sft import SftTrainer, Transcript
from thresher.engine.training.train import train
from thresher.engine.training.update import Updater, UpdateStats, choose_attention
from thresher.kernels.attention.backends.choice import load_attention
from thresher.kernels.attention.varlen import Varlen, varlen_attention
from thresher.policy.model import Policy, init_policy

LIBRARIES = {"varlen_212": "varlen", "flash2": "flash2", "xformers": "xformers"}
ITEMS = [
    TrainSequence(ids=[3, 1, 4, 1, 5, 9], positions=[3, 4, 5], old_logprobs=[-3.0] * 3, advantage=1.0, weight=0.1),
    TrainSequence(ids=[2, 7, 1, 8], positions=[2, 3], old_logprobs=[-3.5] * 2, advantage=-1.0, weight=0.2),
]


def step(policy: Policy) -> UpdateStats:
    vocab = policy.config.vocab_size
    reference = init_policy(policy.config, 1).requires_grad_(False)
    updater = Updater(MasterWeights(policy), reference, OptimSection(lr=1e-3), GrpoSection(beta=0.1), vocab, 1)
    return updater.update(ITEMS, 0, 1.0)


@pytest.mark.parametrize("name", LIBRARIES)
def test_every_layer_of_a_step_is_computed_by_the_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, other = (init_policy(make_config(), 0) for _ in range(2))
    expected = step(plain)
    install(monkeypatch, name)
    library, calls = load_attention(LIBRARIES[name]), []  # type: ignore[arg-type]

    def counted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Varlen) -> torch.Tensor:
        calls.append(q.requires_grad)
        return library(q, k, v, layout)

    monkeypatch.setattr(update, "choose_attention", lambda optim, policy: (counted, "torch"))
    stats = step(other)
    layers = plain.config.num_hidden_layers
    assert calls == [False] * layers + [True] * layers  # the reference's forward, then the policy's
    assert stats.loss == pytest.approx(expected.loss, abs=1e-5)
    assert stats.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)


def test_on_a_cpu_it_is_the_reference_itself() -> None:
    policy = init_policy(make_config(), 0)
    for name in ("auto", "torch"):
        assert choose_attention(OptimSection(attention=name), policy) == (varlen_attention, "torch")
    assert Varlen([1]).attention is varlen_attention


@pytest.mark.parametrize(("name", "why"), [("triton", "serves rollouts and has no backward"), ("flash", "needs CUDA")])
def test_what_does_not_serve_is_refused_before_there_is_a_folder(
    name: str, why: str, tmp_path: Path, make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match=f'^optim.attention is "{name}", which {why}'):
        train(make_recipe(optim={"attention": name}), tmp_path / "run")
    with pytest.raises(UserError, match=f'^rollout.attention is "{name}", which needs CUDA'):
        train(make_recipe(rollout={"attention": name}), tmp_path / "run")
    policy = init_policy(make_config(), 0)
    with pytest.raises(UserError, match=f'^optim.attention is "{name}", which {why}'):
        SftTrainer(policy, [Transcript([1, 2], [1], [])], SftSection(data="d"), OptimSection(attention=name), 5, 0)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
