"""What of a recipe decides its memory, in one flat record that can be varied.

How long a trajectory is. Its context has `length` tokens at most; of these the policy writes `sampled` at most, and its
searches bring `searched`, but for the tags around them. What is left is the prompt, which all samples of a question
begin with: that is certain. What else they may have in common (a turn that coincides; the words before the question,
which groups may share too) is not counted.

    own = min(sampled + searched, length - 1)     prompt = length - own

A shorter prompt makes a smaller group, but for one that is not quite worth sharing (packing.py). On CUDA
the libraries that can share (kernels/attention/backends/parts.py) serve bfloat16.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from thresher.engine.config.recipe import Recipe
from thresher.engine.packing import group_tokens, worth_sharing
from thresher.engine.planning.sizes import BF16, FP32
from thresher.engine.systems import load_system

Place = Literal["auto", "device", "cpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSetting:
    """item: bytes of an element of the computation. adapters: (rank, targets) of [lora], or None. reference: where the
    frozen copy lies, "device", "cpu" or "auto". checkpoint_activations: "on", "off" or "auto". offload: what lies on
    the CPU, "none", "moments" or "masters" (moments, too). share_rows: whether the update computes a common beginning
    once. length, sampled, searched: tokens of a trajectory, at most, as above."""

    cuda: bool
    item: int
    adapters: tuple[int, tuple[str, ...]] | None
    beta: bool
    reference: Place
    micro_batch_tokens: int
    loss_workspace_bytes: int | None
    checkpoint_activations: str
    moments: str
    offload: str
    share_rows: bool
    share_prefix: bool
    group: int
    questions: int
    length: int
    sampled: int
    searched: int
    running: int
    kv_tokens: int | None
    page_size: int
    steps: int
    updates: int
    epochs: int
    recomputes: bool  # old log-probs, by a forward before a batch's first update
    gpus: int

    @property
    def groups(self) -> int:
        """Of a step, on one GPU, which has them whole."""
        return -(-self.questions // self.gpus)

    @property
    def samples(self) -> int:
        return self.groups * self.group

    @property
    def groups_of_update(self) -> int:
        return -(-self.groups // self.updates)

    @property
    def own(self) -> int:
        """Tokens of a sample that no other of its group need have, at most."""
        return min(self.sampled + self.searched, self.length - 1)

    @property
    def prompt(self) -> int:
        """Tokens that a group's samples begin with, where their own are as many as can be."""
        return self.length - self.own

    @property
    def prompt_once(self) -> bool:
        """Whether an update computes a group's prompt once."""
        return self.share_rows and worth_sharing(self.prompt, self.own, self.group)

    @property
    def computed_tokens(self) -> int:
        """Of a group in an update, at most."""
        if self.share_rows:
            return group_tokens(self.prompt, self.own, self.group)
        return self.group * self.length

    @property
    def frozen_copy(self) -> bool:
        """Whether the reference is a model of its own: with adapters it is the base."""
        return self.beta and self.adapters is None

    @property
    def has_masters(self) -> bool:
        return self.item != FP32 and self.adapters is None

    def choices(self) -> Iterator["PlanSetting"]:
        """The record with each value that "auto" may take, in the order in which they are tried."""
        recomputed = [self.checkpoint_activations]
        references: list[Place] = [self.reference]
        if self.reference == "auto":
            references = ["device", "cpu"] if self.cuda and self.frozen_copy else ["device"]
        if self.checkpoint_activations == "auto":
            recomputed = ["off", "on"]
        for reference in references:
            for value in recomputed:
                yield replace(self, reference=reference, checkpoint_activations=value)


def read_setting(recipe: Recipe, gpus: int = 1) -> PlanSetting:
    """The record of a recipe that its system's preset has filled."""
    rollout, optim = recipe.rollout, recipe.optim
    lora, system = recipe.lora, recipe.system
    cuda, item = recipe.model.device == "cuda", BF16 if recipe.model.dtype == "bfloat16" else FP32
    searches = rollout.max_turns - 1 if system is None or load_system(system.name, system.options).needs_index else 0
    written = min(rollout.max_policy_tokens or rollout.max_context, rollout.max_turns * rollout.max_turn_tokens)
    return PlanSetting(
        cuda=cuda,
        item=item,
        adapters=None if lora is None else (lora.rank, tuple(lora.targets)),
        beta=recipe.grpo.beta > 0,
        reference=recipe.grpo.reference,
        micro_batch_tokens=optim.micro_batch_tokens,
        loss_workspace_bytes=optim.loss_workspace_bytes,
        checkpoint_activations=optim.checkpoint_activations,
        moments=optim.optimizer_state_dtype,
        offload=optim.offload,
        # On CUDA by torch's varlen attention; "flash" may be FlashAttention-3, which shares nothing.
        share_rows=optim.share_prefix and (not cuda or (item == BF16 and optim.attention in ("auto", "torch"))),
        share_prefix=rollout.share_prefix,
        group=rollout.group_size,
        questions=rollout.questions_per_step,
        length=rollout.max_context,
        sampled=min(written, rollout.max_context),
        searched=searches * rollout.max_passage_tokens,
        running=rollout.max_num_seqs,
        kv_tokens=rollout.kv_tokens,
        page_size=rollout.kv_block_size,
        steps=recipe.run.steps,
        updates=recipe.grpo.updates_per_batch,
        epochs=recipe.grpo.epochs_per_batch,
        recomputes=recipe.grpo.old_logprobs == "recomputed",
        gpus=gpus,
    )


Change = tuple[str, Callable[[PlanSetting], PlanSetting]]  # the words of a recipe, and what they do to a record


def switches(setting: PlanSetting) -> list[Change]:
    """What can be turned to need less memory, the cheapest first: those that are not turned, nor left to the plan."""

    def changed(**values: Any) -> Callable[[PlanSetting], PlanSetting]:
        return lambda setting: replace(setting, **values)

    found: list[Change] = []
    if setting.checkpoint_activations == "off":
        found.append(('optim.checkpoint_activations = "on"', changed(checkpoint_activations="on")))
    if setting.moments != "8bit":
        found.append(('optim.optimizer_state_dtype = "8bit"', changed(moments="8bit")))
    if not setting.cuda:
        return found
    if setting.frozen_copy and setting.reference == "device":
        found.append(('grpo.reference = "cpu"', changed(reference="cpu")))
    if setting.offload == "none":
        found.append(('optim.offload = "moments"', changed(offload="moments")))
    if setting.offload != "masters" and setting.has_masters:
        found.append(('optim.offload = "masters"', changed(offload="masters")))
    return found
