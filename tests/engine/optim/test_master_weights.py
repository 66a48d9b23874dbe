"""Masters in another memory than the policy: with both on a CPU, the bits are those of masters in the same memory."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch

from thresher.engine.config.sections import GrpoSection, OptimSection
from thresher.engine.optim import master_weights as module
from thresher.engine.optim.master_weights import MasterWeights
from thresher.engine.packing import TrainSequence
from thresher.engine.training.update import Updater
from thresher.policy.model import Policy


def items(seed: int) -> list[TrainSequence]:
    generator = torch.Generator().manual_seed(seed)
    return [
        TrainSequence(
            ids=torch.randint(1, 29, (length,), generator=generator).tolist(),
            positions=list(range(4, length)),
            old_logprobs=[-3.0] * (length - 4),
            advantage=advantage,
            weight=0.05,
        )
        for length, advantage in ((12, 1.0), (9, -0.7), (17, 0.4))
    ]


@pytest.mark.parametrize("tied", [True, False])
def test_masters_in_another_memory_change_no_bit(
    make_tiny_policy: Callable[..., Policy], tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COPY_CHUNK", 700)  # several per matrix
    ends, copied = [], list[int]()
    monkeypatch.setattr(MasterWeights, "_note_copy", lambda _, number: copied.append(number))
    for offload in ("none", "masters"):
        master = make_tiny_policy(tie_word_embeddings=tied).requires_grad_(True)
        policy = deepcopy(master).bfloat16().requires_grad_(True)
        optim = OptimSection(lr=1e-2, offload=offload, micro_batch_tokens=20)  # two micro-batches
        updater = Updater(
            MasterWeights(policy, master, offload == "masters"), None, optim, GrpoSection(beta=0.0), 29, 3
        )
        assert not copied
        stats = [updater.update(items(step), step, 1.0) for step in range(3)]
        ends.append((master, policy, [entry.grad_norm for entry in stats]))
    assert max(copied) > 10 and ends[0][2] == ends[1][2]
    for one, other in zip(ends[0][:2], ends[1][:2], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    policies = zip(ends[1][1].parameters(), ends[1][0].parameters(), strict=True)
    assert all(torch.equal(used, trained.bfloat16()) for used, trained in policies)


def test_a_policy_of_float32_is_its_own_master(make_tiny_policy: Callable[..., Policy]) -> None:
    policy = make_tiny_policy().requires_grad_(True)
    own = MasterWeights(policy, offloaded=True)
    assert not own.offloaded and own.head_gradient() is policy.head_VH.grad is not None
    policy.norm.grad = torch.ones_like(policy.norm)
    own.add_gradients()
    own.complete()
    own.refresh()
    assert policy.norm.grad is not None, "nothing to collect"
