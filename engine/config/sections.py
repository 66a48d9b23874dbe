"""The sections of a recipe: one frozen dataclass each, one line a field.

A field's type has its bounds; tables.py derives the reader, the writer, the digest and the errors from it. The comment
behind a field, or above it, is its description in `thresher recipe --explain` and docs/recipe.md (reference.py).
recipe.py puts the sections together and defines what a resumed run may change.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal, get_args

from thresher.engine.config.objectives import CLIPPED, OBJECTIVES, surrogate_name
from thresher.engine.config.sampling import HIGHEST, LOWEST
from thresher.engine.config.tables import (
    BelowOne,
    Count,
    FieldError,
    Natural,
    NotNegative,
    NotNegative32,
    Positive,
    Section,
    Share,
    SmallCount,
    Within,
    shown,
)
from thresher.rewards.advantages import SCALES

# What fits an advantage that is finer than a trajectory's, for which rewards/credit.py has no more.
FITTING: dict[str, dict[str, tuple[str, ...]]] = {
    "turn": {"baseline": ("leave_one_out", "none"), "scale": ("none",)},
    "anchor": {"baseline": ("group", "leave_one_out"), "scale": ("group", "none")},
    "tree": {"baseline": ("group", "leave_one_out"), "scale": ("group", "none")},
}
Estimator = Literal["k1", "k2", "k3", "k3_ratio", "none"]
Attention = Literal["auto", "torch", "triton", "flash", "xformers"]  # kernels/attention/backends/choice.py has them


@dataclass(frozen=True, kw_only=True)
class ModelSection(Section):
    """[model] the policy that training starts from."""

    path: str  # folder of the model: config.json, safetensors, tokenizer.json
    dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of the computation; trained weights are kept in float32
    device: Literal["cpu", "cuda"] = "cpu"  # device of the computation
    prompt: Literal["raw", "chat"] = "raw"  # chat: prompts are wrapped in the model's chat template


@dataclass(frozen=True, kw_only=True)
class DataSection(Section):
    """[data] questions."""

    train: str  # JSONL, one question a line
    dev: str | None = None  # JSONL, questions of evaluations
    limit: Count | None = None  # number of training questions, the first of the file; None: all


@dataclass(frozen=True, kw_only=True)
class RetrievalSection(Section):
    """[retrieval] the index or the server that answers searches; neither, if the questions contain their passages."""

    index: str | None = None  # folder written by `thresher index`
    url: str | None = None  # URL of a server: `thresher serve-retriever`, or one with Search-R1's /retrieve
    timeout: Positive = 60.0  # seconds to wait for one answer of the server
    patience: NotNegative = 120.0  # seconds to retry an unreachable server; then the run ends and can be resumed
    k: SmallCount = 3  # passages per search
    passage_format: str = 'Doc {number}(Title: "{title}") {text}'  # one line per passage
    shuffle: bool = False  # show the passages of a search in random order (by the sample's seed), not by score

    def check(self) -> None:
        if self.index is not None and self.url is not None:
            raise FieldError("index", "expected either index, a folder, or url, a server, got both")

    @classmethod
    def wants(cls) -> str:
        return "index or url"


@dataclass(frozen=True, kw_only=True)
class SystemSection(Section):
    """[system] the paper's protocol: prompt, tags, episode, reward."""

    name: str  # name of a system in engine/systems/, or path of your own file
    template: str | None = None  # file with a prompt template in place of the built-in one
    options: dict[str, Any] = field(default_factory=dict)  # switches of the system, checked by the system


@dataclass(frozen=True, kw_only=True)
class RolloutSection(Section):
    """[rollout] how trajectories are sampled. Lengths are in tokens."""

    group_size: SmallCount = 8  # samples per question, G
    trees: Annotated[int, Within(0, 65536)] = 0  # trees whose leaves are these samples; 0: independent samples
    tree_nodes: SmallCount = 2  # nodes that each tree expands per round; G = trees x (1 + tree_nodes x rounds)
    questions_per_step: SmallCount = 16  # questions per rollout, each with group_size samples
    max_turns: SmallCount = 5  # largest number of policy turns per trajectory, valid or not
    max_turn_tokens: Count = 256  # limit of one policy turn
    max_policy_tokens: Count | None = None  # limit of all policy turns of a trajectory together; None: max_context
    max_context: Count = 4096  # limit of each context of a trajectory, with prompt and passages
    max_passage_tokens: Count = 512  # limit of the passages of a search, or of those in the prompt
    temperature: Annotated[float, Within(LOWEST, HIGHEST)] = 1.0  # temperature of sampling, which divides the logits
    max_num_seqs: SmallCount = 128  # sequences decoded at once
    kv_tokens: Count | None = None  # capacity of the KV cache in tokens; None: enough for max_num_seqs sequences
    kv_block_size: Count = 64  # positions per block of the KV cache (elsewhere: page size)
    # draft tokens per sample and forward; 0: none
    num_draft_tokens: Literal["auto"] | Annotated[int, Within(0, 8)] = "auto"
    attention: Attention = "auto"  # attention backend
    share_prefix: bool = True  # compute attention to a shared prefix once instead of once per sample; same results
    partial: bool = False  # end a step before all groups have ended; the others continue with the next weights
    # groups sampled at once with partial; None: questions_per_step x (1 + max_staleness)
    groups_in_flight: SmallCount | None = None
    # with partial: largest number of updates between a group's first token and its own update
    max_staleness: Natural = 1
    stale_cache: bool = False  # with partial: keep keys and values computed with older weights
    # stored results of tool calls, used in place of calls: the folder of a run or evaluation, or a file of `thresher
    # rollout`
    tools_replay: str | None = None

    FORMER: ClassVar[Mapping[tuple[str, str], str]] = {
        ("attention", "shared"): "leave it out; it meant rollout.share_prefix = true, which is the default",
        ("attention", "separate"): "write rollout.share_prefix = false instead",
    }

    def check(self) -> None:
        many = self.trees * self.tree_nodes
        if self.trees and (self.group_size <= self.trees or (self.group_size - self.trees) % many):
            rounds = max((self.group_size - self.trees) // many, 0)
            near = [self.trees + many * each for each in (rounds, rounds + 1) if each]
            raise FieldError(
                "group_size",
                f"expected trees x (1 + tree_nodes x rounds), such as {' or '.join(map(str, near))} with trees = "
                f"{self.trees} and tree_nodes = {self.tree_nodes}, got {self.group_size}",
            )
        if not self.partial:
            for key, unset in (("groups_in_flight", None), ("max_staleness", 1), ("stale_cache", False)):
                if getattr(self, key) != unset:
                    raise FieldError(
                        key, "expected it unset with partial = false, because every group ends in its step"
                    )
            return
        if self.max_staleness == 0:
            raise FieldError(
                "max_staleness", "expected an integer >= 1 with partial = true, because at 0 no group outlives its step"
            )
        least, most = self.questions_per_step, self.questions_per_step * (1 + self.max_staleness)
        if not least < self.in_flight <= most:
            raise FieldError(
                "groups_in_flight",
                f"expected {least + 1} to {most}, more than questions_per_step and at most questions_per_step x "
                f"(1 + max_staleness), got {self.groups_in_flight}",
            )

        if self.kv_tokens is not None and self.in_flight > (blocks := self.kv_tokens // self.kv_block_size):
            raise FieldError(
                "groups_in_flight",
                f"expected at most the {blocks} blocks of kv_tokens = {self.kv_tokens}, got {self.in_flight}",
            )

    @property
    def policy_tokens(self) -> int:
        """Return how many tokens the policy writes in a trajectory, at most."""
        return min(self.max_policy_tokens or self.max_context, self.max_turns * self.max_turn_tokens)

    @property
    def in_flight(self) -> int:
        """Return how many groups are begun and not yet trained on, at most."""
        if not self.partial:
            return self.questions_per_step
        return self.groups_in_flight or self.questions_per_step * (1 + self.max_staleness)


@dataclass(frozen=True, kw_only=True)
class ToolSection(Section):
    """[tools.NAME] a tool that episodes call by its NAME: a Python function, a server, or a chat model that simulates a
    search engine (docs/systems.md)."""

    function: str | None = None  # FILE.py:FUNCTION, called with the arguments as keywords
    url: str | None = None  # URL of a server that receives {"name", "arguments"} and returns {"result"} or {"error"}
    chat_url: str | None = None  # URL of a chat model (/v1/chat/completions) that writes documents for a query
    model: str | None = None  # with chat_url: name of the chat model
    template: str | None = None  # with chat_url: file with the prompt, with {query}, {quality}, {question}, {answer}
    # probability that a call returns noise, at the first step and at the last; your own function or server then also
    # receives the arguments noisy, question and golds
    noise: tuple[Share, Share] | None = None
    noise_base: Annotated[float, Within(1, 1e9)] = (
        4.0  # base of the noise schedule: the larger, the later it rises; 1: linear
    )
    timeout: Positive = 10.0  # seconds per call; after that its result is an error, and a later answer is dropped
    max_tokens: Count | None = None  # limit of a result, which is truncated; None: rollout.max_passage_tokens
    concurrency: SmallCount = 8  # calls at once; no call starts while as many others are past their timeout

    def check(self) -> None:
        given = [key for key in ("function", "url", "chat_url") if getattr(self, key) is not None]
        if len(given) != 1:
            expected = "function, FILE.py:FUNCTION, or url, a server, or chat_url, a chat model's"
            raise FieldError("function", f"expected one of {expected}, got {' and '.join(given) or 'none'}")
        if (self.chat_url is None) != (self.model is None):
            raise FieldError("model", "expected the chat model's name with chat_url, and none without it")
        if self.template is not None and self.chat_url is None:
            raise FieldError("template", "expected none without chat_url, because no prompt is sent")
        if self.function is not None and not re.fullmatch(r".+\.py:[^\W\d]\w*", self.function):
            raise FieldError("function", f"expected FILE.py:FUNCTION, got {shown(self.function)}")


@dataclass(frozen=True, kw_only=True)
class GrpoSection(Section):
    """[grpo] from rewards to the loss; symbols as in kernels/loss.py."""

    # grpo, dr_grpo, dapo, cispo, gspo, sapo, gmpo, dppo, dppo_kl, reinforce, rloo, reinforce++ (docs/objectives.md), or
    # FILE.py:FUNCTION, your own surrogate
    objective: str = "grpo"
    baseline: Literal["group", "leave_one_out", "batch", "none"] = "group"  # what is subtracted from a reward
    scale: Literal["group", "batch", "none"] = "group"  # standard deviation that divides advantages
    # rewards behind a token's advantage: trajectory: its trajectory's; turn: its turn's and all later ones'
    # (return-to-go); anchor: its trajectory's, and its turn's among turns that start in the same state; token: its
    # trajectory's and those of spans; tree: those of the leaves below its turn, with rollout.trees (docs/objectives.md)
    advantage: Literal["trajectory", "turn", "anchor", "token", "tree"] = "trajectory"
    gamma: Share = 1.0  # discount per turn, with turn and anchor
    omega: NotNegative32 = 1.0  # with anchor: weight of the turn's advantage
    across: NotNegative32 = 1.0  # with tree: weight of the comparison across trees; that within a tree has 1
    anchor: Literal["context", "observation"] = "context"  # state of a turn: the whole context, or the last observation
    clip_low: Share = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: NotNegative32 = 0.2  # see clip_low
    tau_positive: Positive = 1.0  # sapo's temperature of tokens with advantage > 0
    tau_negative: Positive = 1.05  # sapo's temperature of the others
    divergence: NotNegative32 = 0.15  # dppo's delta: beyond it a token that increases the divergence has no gradient
    # llds: a penalty on falling likelihood of turns with advantage >= 0; llds_positive: of turns with advantage > 0
    guard: Literal["none", "llds", "llds_positive"] = "none"
    guard_weight: NotNegative32 = 0.2  # weight of the guard, lambda in LLDS
    overlong_tokens: Natural = 0  # DAPO's buffer: over the last so many tokens the reward falls by up to 1
    dual_clip: Annotated[float, Within(1, 3.4e38, open_low=True)] | None = None  # bounds the ratio if advantage < 0
    kl_value: Estimator = "k3"  # KL estimator in the loss and in the metrics
    kl_gradient: Estimator | None = None  # KL estimator that gives the gradient; None: kl_value
    beta: NotNegative32 = 1e-3  # weight of the KL; with 0 there is no reference model
    entropy_coef: NotNegative32 = 0.0  # weight of the entropy bonus
    aggregation: Literal["trajectory", "token", "constant"] = "trajectory"  # what the loss is averaged over
    aggregation_constant: Annotated[float, Within(1e-3, 1e9)] | None = (
        None  # of "constant": divisor of a trajectory's sum, in tokens
    )
    std_floor: Positive = 1e-6  # advantages are divided by max(std, std_floor) + std_eps
    std_eps: NotNegative = 0.0  # see std_floor; 1e-4 in TRL and in ARENA's code
    sample_std: bool = False  # divide the variance by n - 1 instead of n
    drop_zero_advantage: bool = False  # leave trajectories with advantage 0 out of the update; they still count in N
    # whether groups whose advantages are all 0 count in the mean of the loss; false leaves them out of the update too
    count_zero_advantage_groups: bool = True
    refill: bool = False  # DAPO's dynamic sampling: replace groups without a signal (docs/objectives.md)
    refill_rounds: Count = 10  # with refill: largest number of sampling rounds per step
    reference: Literal["auto", "device", "cpu"] = "auto"  # memory of the reference model; cpu: copied layer by layer
    updates_per_batch: Count = 1  # optimiser steps per pass over a rollout batch; groups stay whole
    epochs_per_batch: Count = 1  # passes over a rollout batch (PPO's epochs), in the same order
    # recorded in the rollout, or recomputed before the update
    old_logprobs: Literal["rollout", "recomputed"] = "rollout"
    # importance weight recomputed/rollout, per token or per context
    tis_level: Literal["none", "token", "sequence"] = "none"
    # truncate: weights above the cap become the cap; mask: those above the cap or below the floor become 0
    tis_rule: Literal["truncate", "mask"] = "truncate"
    tis_cap: Annotated[float, Within(1)] = 2.0  # largest weight
    tis_floor: Share | None = None  # smallest weight of "mask"; None: 1 / tis_cap
    shuffle_rewards: bool = False  # shuffle rewards within each group, as a control

    def check(self) -> None:
        for key, allowed in FITTING.get(self.advantage, {}).items():
            if getattr(self, key) not in allowed:
                expected, got = " or ".join(allowed), getattr(self, key)
                raise FieldError(key, f"expected {expected} with advantage = {shown(self.advantage)}, got {got}")
        if self.advantage in ("anchor", "tree") and self.baseline == "leave_one_out" and self.scale != "none":
            expected = f'none with advantage = {shown(self.advantage)} and baseline = "leave_one_out"'
            raise FieldError("scale", f"expected {expected}, got {self.scale}")
        if self.scale not in SCALES[self.baseline]:
            fitting = " or ".join(SCALES[self.baseline])
            raise FieldError("scale", f"expected {fitting} with baseline = {shown(self.baseline)}, got {self.scale}")
        path, colon, function = self.objective.rpartition(":")
        if self.objective not in OBJECTIVES and not (colon and path.endswith(".py") and function.isidentifier()):
            near = get_close_matches(self.objective, OBJECTIVES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(OBJECTIVES)}, or FILE.py:FUNCTION"
            raise FieldError("objective", f"expected the name of an objective, got {shown(self.objective)}; {hint}")
        if self.dual_clip is not None and surrogate_name(self.objective) not in CLIPPED:
            takers = ", ".join(name for name, one in OBJECTIVES.items() if one.surrogate in CLIPPED)
            raise FieldError(
                "dual_clip", f"expected none with objective = {shown(self.objective)}; only {takers} use it"
            )
        if (self.aggregation == "constant") != (self.aggregation_constant is not None):
            expected = "a number > 0" if self.aggregation == "constant" else "no value"
            got = "nothing" if self.aggregation_constant is None else shown(self.aggregation_constant)
            raise FieldError(
                "aggregation_constant",
                f'expected {expected} with aggregation = "{self.aggregation}", got {got}',
            )
        if self.tis_level != "none" and self.old_logprobs != "recomputed":
            raise FieldError(
                "old_logprobs",
                f'expected "recomputed" with tis_level = "{self.tis_level}", because with "rollout" the ratio '
                "already contains the weight",
            )
        if self.tis_floor is not None and self.tis_rule != "mask":
            raise FieldError("tis_floor", 'expected none with tis_rule = "truncate", which has no floor')
        if self.tis_level != "none" and self.tis_rule == "mask" and self.tis_cap == 1:
            raise FieldError("tis_cap", 'expected more than 1 with tis_rule = "mask", which drops what is beyond it')
        if self.guard != "none" and self.tis_level != "none" and self.tis_rule == "mask":
            raise FieldError(
                "tis_rule",
                f'expected "truncate" with guard = "{self.guard}", which depends on the sign of the advantage',
            )
        if self.reference == "cpu" and self.beta == 0:
            raise FieldError(
                "reference", 'expected a beta > 0 with reference = "cpu", because at 0 there is no reference'
            )


@dataclass(frozen=True, kw_only=True)
class OptimSection(Section):
    """[optim] AdamW on float32 weights. `lr`, `warmup_ratio`, `schedule` and `schedule_steps` apply to GRPO alone, the
    other keys to SFT too."""

    lr: NotNegative = 1e-6  # learning rate
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)  # decay rates of the first and second moment
    eps: Annotated[float, Within(1e-30)] = 1e-8  # added to the root of the second moment
    weight_decay: NotNegative = 0.0  # decoupled weight decay
    warmup_ratio: BelowOne = 0.0  # share of the steps over which the learning rate rises
    # of lr after the warm-up; linear and cosine reach 0 after the last step
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    schedule_steps: Count | None = None  # length of warm-up and schedule together; None: run.steps
    # gradient norm to clip at; inf: no clipping
    max_grad_norm: Annotated[float, Within(0, math.inf, open_low=True)] = 1.0
    micro_batch_tokens: Count = 16384  # tokens per forward; trajectories are packed up to this number
    attention: Attention = "auto"  # attention backend, forward and backward
    share_prefix: bool = True  # train: compute a prefix shared by trajectories once, where that saves time
    # memory of the loss; None: 256 MiB on a CPU, 560 MiB on CUDA (docs/loss.md)
    loss_workspace_bytes: Count | None = None
    # on: recompute in the backward; auto: as thresher plan decides for train, off for sft
    checkpoint_activations: Literal["auto", "on", "off"] = "auto"
    optimizer_state_dtype: Literal["float32", "8bit"] = (
        "float32"  # dtype of the moments; 8bit: blockwise, 2 bytes per weight in place of 8
    )
    # what lies in CPU memory: moments, or moments and float32 masters
    offload: Literal["none", "moments", "masters"] = "none"


@dataclass(frozen=True, kw_only=True)
class RunSection(Section):
    """[run] number of steps, and intervals of evaluations, checkpoints and stored trajectories."""

    steps: Natural = 100  # GRPO steps, one rollout each
    token_budget: Count | None = None  # end earlier, after so many computed tokens: prefilled, sampled and in updates
    seed: Annotated[int, Within(0, 2**63 - 1)] = 0  # seed of all random draws
    eval_every: Count | None = None  # steps between evaluations; None: only before the first and after the last
    eval_questions: Count | None = None  # questions per evaluation, the first of data.dev; None: all
    save_every: Count = 50  # steps between checkpoints
    keep_checkpoints: Count = 2  # newest checkpoints to keep, besides the best
    best_metric: str | None = None  # measure that chooses the best checkpoint; None: em, or reward if there is none
    # threads of torch on a CPU; see engine/threads.py
    threads: Literal["auto"] | Annotated[int, Within(1, 4096)] = "auto"
    keep_trajectories: Natural = 1  # store the trajectories of every n-th step; 0: of none
    token_stats_mib: Natural = 256  # MiB for token statistics of stored trajectories; the oldest are deleted; 0: none
    verify: bool = True  # check the hashes of checkpoints and indexes when reading them
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()  # trackers that receive the metrics too
    async_: bool = False  # with torchrun: half of the ranks sample the next batch while the others train

    def check(self) -> None:
        if len(set(self.trackers)) < len(self.trackers):
            raise FieldError("trackers", f"expected each once, got {shown(list(self.trackers))}")


@dataclass(frozen=True, kw_only=True)
class SftSection(Section):
    """[sft] supervised fine-tuning on segmented transcripts, or on questions with their answers.

    With `stop_at_copy_accuracy`, copying accuracy on the held-out transcripts is measured every `gate_every` steps.
    Training ends when it is reached, and starts again with another seed if it is not reached in `steps` steps.
    """

    transcripts: str | None = None  # JSONL of segmented transcripts
    data: str | None = None  # JSONL of questions, whose first gold answer is the target
    format: Literal["qa", "closed-book", "direct", "reasoning"] = "qa"  # with data: form of a transcript (docs/sft.md)
    answer: Literal["tagged", "plain"] = "tagged"  # with data: `<answer>gold</answer>`, or the bare answer
    template: str | None = None  # with data: file with a prompt template in place of the built-in one
    steps: Count = 1000  # largest number of optimiser steps
    batch_size: SmallCount = 32  # transcripts per step
    lr: NotNegative = 1e-5  # learning rate
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # of the learning rate, after the warm-up
    warmup_ratio: BelowOne = 0.0  # share of the steps over which the learning rate rises
    # share of the transcripts, the first, that are not trained but measure copying; None: .05 with
    # stop_at_copy_accuracy, else 0
    held_out: BelowOne | None = None
    stop_at_copy_accuracy: Share | None = (
        None  # share of correctly copied names that ends training; None: train all steps
    )
    gate_every: Count = 50  # steps between measurements of copying accuracy
    min_steps: Natural = 0  # no measurement before this step
    max_restarts: Natural = 2  # new attempts with other seeds if the accuracy is not reached
    save_every: Count = 200  # steps between checkpoints, from which --resume continues

    def check(self) -> None:
        if (self.transcripts is None) == (self.data is None):
            got = "neither" if self.data is None else "both"
            raise FieldError("transcripts", f"expected either transcripts or data, questions, got {got}")
        if self.format == "reasoning" and (self.template is not None or self.answer != "tagged"):
            raise FieldError("format", "reasoning uses its system's template and tags; leave out template and answer")
        if self.stop_at_copy_accuracy is not None and self.held_out == 0:
            raise FieldError("held_out", "expected a number > 0 with stop_at_copy_accuracy, got 0.0")

    @classmethod
    def wants(cls) -> str:
        return "transcripts or data"


@dataclass(frozen=True, kw_only=True)
class JudgeSection(Section):
    """[judge] judges of rewards and measures: a classifier of entailment, a chat model for verdicts."""

    entailment: str | None = None  # folder of an NLI classifier; None: word overlap in its place
    labels: tuple[str, ...] | None = None  # labels of the classifier's outputs, in order, if its config.json has none
    max_tokens: Count | None = None  # limit of premise and hypothesis together; None: the classifier's own limit
    batch_tokens: Count | None = None  # padded tokens per forward; None: chosen for the device
    device: Literal["cpu", "cuda"] = "cpu"  # device of the classifier
    cache_size: Natural = 65_536  # pairs whose results are kept in memory
    # URL of a server with OpenAI's /v1/chat/completions, for verdicts: on all answers in `eval`, and in `train` if the
    # system's reward uses them
    url: str | None = None
    model: str | None = None  # name of the chat model
    prompt: str = "lenient"  # prompt of verdicts: lenient, strict, or a file with {golds} and {response}
    key_env: str | None = None  # environment variable with the key; a recipe never contains the key itself
    timeout: Positive = 120.0  # seconds to wait for one reply
    retry_seconds: NotNegative = 300.0  # seconds to retry an unreachable server
    concurrency: SmallCount = 4  # requests at once
    replies: str | None = None  # JSONL file of all replies, so that no request is paid for twice

    def check(self) -> None:
        if self.labels is not None and self.entailment is None:
            raise FieldError("labels", "expected none without entailment, the classifier that the labels belong to")
        if (self.url is None) != (self.model is None):
            missing, given = ("url", "model") if self.url is None else ("model", "url")
            raise FieldError(missing, f"expected a string if {given} is set, got nothing")
        # A user who put the key itself here must not see it printed.
        if self.key_env is not None and not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", self.key_env):
            raise FieldError("key_env", "expected the name of an environment variable such as API_KEY, not a key")


Target = Literal[
    "q", "k", "v", "o", "gate", "up", "down", "linear_qkv", "linear_z", "linear_b", "linear_a", "linear_out"
]
TARGETS: tuple[Target, ...] = get_args(Target)


@dataclass(frozen=True, kw_only=True)
class LoraSection(Section):
    """[lora] low-rank adapters for `sft` and `train`; without this section all weights are trained."""

    rank: SmallCount = 16  # rank of the adapters
    alpha: Positive = 32.0  # the adapters are scaled by alpha / rank
    # projections with an adapter, where a layer has them; linear_*: of layers with the gated delta rule
    targets: tuple[Target, ...] = TARGETS
    seed: Annotated[int, Within(0, 2**63 - 1)] = 0  # seed of the initial values

    def check(self) -> None:
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise FieldError("targets", f"expected at least one, each once, got {shown(list(self.targets))}")
