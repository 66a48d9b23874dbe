"""Our side of `thresher bench step`: the engine's own rollout and two updaters around one policy.

One updater shares prefixes, the other does not.

Both are whole steps: each samples its own trajectories, so that only the update differs between them. In `search` the
episode searches, and what it finds is inserted as a retrieved segment.

Deliberately absent: scoring by a system's reward. A reward of ids stands in for it on both sides.
"""

import copy
import time
from dataclasses import replace

import torch

from thresher.bench.rollout.ours import RolloutSide
from thresher.bench.step.setting import Seconds, Setting, reward_of
from thresher.engine.config.sections import GrpoSection, LoraSection, OptimSection
from thresher.engine.optim.master_weights import MasterWeights
from thresher.engine.packing import advantages, build_train_sequences
from thresher.engine.protocol.trajectory import Trajectory
from thresher.engine.training.update import Updater
from thresher.policy.lora import add_lora
from thresher.policy.model import Policy


class Ours:
    """A policy with its rollout and two updaters. Their steps train the same weights, one after the other.

    parts: seconds of decoding, prefill and the host in the last rollout. asked, computed: tokens of the last update, as
    if nothing were shared and as they went through the model.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        shape, policy = setting.shape, copy.deepcopy(setting.rollout.policy)
        weights, reference = _trained(policy, shape.lora)
        self.side = RolloutSide(replace(setting.rollout, policy=policy))
        self.grpo = GrpoSection(beta=shape.beta, kl_value="k3_ratio")  # TRL's default is the same estimator
        self.updaters = {
            share: Updater(
                weights=weights,
                reference=reference,
                optim=OptimSection(lr=shape.lr, share_prefix=share),
                grpo=self.grpo,
                vocab_size=setting.rollout.tokenizer.vocab_size,
                total_steps=1,
            )
            for share in (True, False)
        }
        self.updaters[False].optimizer = self.updaters[True].optimizer  # one set of moments
        self.steps = self.asked = self.computed = 0
        self.parts: dict[str, float] = {}

    @property
    def policy(self) -> Policy:
        return self.updaters[True].policy

    def sample(self) -> list[Trajectory]:
        """The trajectories of a step, each with its full length."""
        return self.side.sample()

    def step(self, share_prefix: bool) -> Seconds:
        """One GRPO step, timed."""
        self._wait()
        wall, cpu = time.perf_counter(), time.process_time()
        trajectories = self.sample()
        self._wait()
        sampled, sampled_cpu = time.perf_counter(), time.process_time()
        rewards = [reward_of([t.ids()[p] for p in t.policy_positions()]) for t in trajectories]
        advantage = advantages(rewards, [trajectory.group for trajectory in trajectories], self.grpo)
        items = build_train_sequences(trajectories, advantage, self.grpo)
        stats = self.updaters[share_prefix].update(items, self.steps, 1.0)
        self._wait()
        seconds = Seconds(sampled - wall, time.perf_counter() - wall, sampled_cpu - cpu, time.process_time() - cpu)
        self.steps += 1
        clock = self.side.rollout.clock
        self.parts = {"decode": clock.decode, "prefill": clock.prefill, "search": clock.search, "host": clock.rest}
        self.asked, self.computed = sum(len(item.ids) - 1 for item in items), stats.computed_tokens
        return seconds

    def _wait(self) -> None:
        if self.setting.device.type == "cuda":
            torch.cuda.synchronize()


def _trained(policy: Policy, lora: int | None) -> tuple[MasterWeights, Policy]:
    """(the trained weights, the reference); `policy` is made trainable in place."""
    if lora is not None:
        section = LoraSection(rank=lora)
        add_lora(policy, rank=lora, alpha=section.alpha, targets=section.targets, seed=section.seed)
        return MasterWeights(policy), policy  # the reference is the policy with its adapters off
    reference = copy.deepcopy(policy).requires_grad_(False)
    policy.requires_grad_(True)
    master = None if policy.dtype == torch.float32 else copy.deepcopy(policy).float().requires_grad_(True)
    return MasterWeights(policy, master), reference
