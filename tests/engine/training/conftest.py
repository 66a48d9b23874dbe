"""Settings and probes for all tests of training."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from exact_norms import exact_norms
from train_cases import single_threaded

from thresher.common import signals
from thresher.engine.optim.master_weights import MasterWeights
from thresher.policy.model import Policy


@pytest.fixture(scope="module", autouse=True)
def one_thread_and_float64_as_the_truth() -> Iterator[None]:
    with single_threaded(), exact_norms():
        yield


@pytest.fixture
def handled() -> Iterator[None]:
    """Handle signals as the program does, even if a shell's background job ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with signals.handle_signals():
        yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def checkpointed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record for every forward of a policy whether its layers are recomputed in the backward."""
    calls = []
    hidden = Policy.hidden

    def noted(self: Policy, *arguments: Any) -> torch.Tensor:
        calls.append(arguments[3:] == (True,))
        return hidden(self, *arguments)

    monkeypatch.setattr(Policy, "hidden", noted)
    return calls


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Catch the gradient that the last update would have stepped on, by name; the weights do not change."""
    found: dict[str, torch.Tensor] = {}

    def catch(weights: MasterWeights, _: float) -> float:
        found.clear()
        for name, parameter in weights.module.named_parameters():
            if parameter.grad is not None:
                found[name], parameter.grad = parameter.grad, None
        return 0.0

    monkeypatch.setattr(MasterWeights, "clip", catch)
    return found
