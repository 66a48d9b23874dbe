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
    """[model] the policy to start from."""

    path: str  # the model's folder: config.json, safetensors, tokenizer.json
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the computation; trained weights are float32
    device: Literal["cpu", "cuda"] = "cpu"  # the device that computes
    prompt: Literal["raw", "chat"] = "raw"  # chat: prompts are put into the model's own chat template


@dataclass(frozen=True, kw_only=True)
class DataSection(Section):
    """[data] questions."""

    train: str  # JSONL, one question a line
    dev: str | None = None  # JSONL, for evaluation
    limit: Count | None = None  # only the first so many training questions


@dataclass(frozen=True, kw_only=True)
class RetrievalSection(Section):
    """[retrieval] where searches go: an index in this process, or a server; neither, if questions bring passages."""

    index: str | None = None  # folder that `thresher index` wrote
    url: str | None = None  # of a server: `thresher serve-retriever`, or one with Search-R1's /retrieve
    timeout: Positive = 60.0  # seconds that one answer of the server may take
    patience: NotNegative = 120.0  # seconds that the server may stay away before the run ends, to be resumed
    k: SmallCount = 3  # passages a search returns
    passage_format: str = 'Doc {number}(Title: "{title}") {text}'  # of a passage, one line each
    shuffle: bool = False  # show a search's passages in an order drawn from the sample's seed, not by score

    def check(self) -> None:
        if self.index is not None and self.url is not None:
            raise FieldError("index", "expected either index, a folder, or url, a server, got both")

    @classmethod
    def wants(cls) -> str:
        return "index or url"


@dataclass(frozen=True, kw_only=True)
class SystemSection(Section):
    """[system] the paper's protocol: prompt, tags, episode, reward."""

    name: str  # of a system in engine/systems/, or the path of a file of one's own
    template: str | None = None  # file that replaces the built-in prompt template
    options: dict[str, Any] = field(default_factory=dict)  # the system's own switches, checked by it


@dataclass(frozen=True, kw_only=True)
class RolloutSection(Section):
    """[rollout] how trajectories are sampled. Lengths are in tokens."""

    group_size: SmallCount = 8  # samples a question, G
    trees: Annotated[int, Within(0, 65536)] = 0  # trees that these samples are the leaves of; 0: all are independent
    tree_nodes: SmallCount = 2  # of trees: nodes that each expands in a round; G = trees x (1 + tree_nodes x rounds)
    questions_per_step: SmallCount = 16  # of a rollout, each with group_size samples
    max_turns: SmallCount = 5  # turns of the policy in a trajectory, whatever they hold
    max_turn_tokens: Count = 256  # of one turn of the policy
    max_policy_tokens: Count | None = None  # of all turns of a trajectory; None: max_context
    max_context: Count = 4096  # of each context of a trajectory, prompt and passages included
    max_passage_tokens: Count = 512  # of a search's passages, or of those in a prompt
    temperature: Annotated[float, Within(LOWEST, HIGHEST)] = 1.0  # of sampling: logits are divided by it
    max_num_seqs: SmallCount = 128  # sequences decoded at once
    kv_tokens: Count | None = None  # tokens whose keys and values are held at once; None: all that those may need
    kv_block_size: Count = 64  # positions in a block of the KV cache (what others call a page)
    num_draft_tokens: Literal["auto"] | Annotated[int, Within(0, 8)] = "auto"  # drafts a sample and forward; 0: none
    attention: Attention = "auto"  # backend of attention
    share_prefix: bool = True  # compute attention to a shared prefix once, not for each sample; same results
    partial: bool = False  # a step ends with its own groups; unfinished ones go on under the next weights
    groups_in_flight: SmallCount | None = None  # of partial; None: questions_per_step x (1 + max_staleness)
    max_staleness: Natural = 1  # of partial: updates between a group's first token and the update that it enters
    stale_cache: bool = False  # of partial: keep the keys and values that older weights computed
    # stored run whose results of tools are taken while no tool is called: the folder of a run or evaluation, or a file
    # of `thresher rollout`
    tools_replay: str | None = None

    FORMER: ClassVar[Mapping[tuple[str, str], str]] = {
        ("attention", "shared"): "leave it out, for what it meant is rollout.share_prefix = true, the default",
        ("attention", "separate"): "what it meant is now written rollout.share_prefix = false",
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
                    raise FieldError(key, "expected it unset with partial = false, where every group ends in its step")
            return
        if self.max_staleness == 0:
            raise FieldError(
                "max_staleness", "expected an integer >= 1 with partial = true, for at 0 no group outlives its step"
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
    """[tools.NAME] a tool that episodes call by its NAME: a Python function, a server, or a chat model that writes what
    a search engine would find (docs/systems.md)."""

    function: str | None = None  # path of a Python file, ":", a function; it gets the arguments by keyword
    url: str | None = None  # of a server that is sent {"name", "arguments"} and answers {"result"} or {"error"}
    chat_url: str | None = None  # of a chat model's server (/v1/chat/completions), asked for documents for a query
    model: str | None = None  # of chat_url: the chat model's name there
    template: str | None = None  # of chat_url: file with the prompt, with {query}, {quality}, {question}, {answer}
    # probability that a call is to return noise, at the first step and at the last; a function or server of one's own
    # then gets the arguments noisy, question and golds as well
    noise: tuple[Share, Share] | None = None
    noise_base: Annotated[float, Within(1, 1e9)] = (
        4.0  # of noise: the larger, the later it rises; 1: with each step alike
    )
    timeout: Positive = 10.0  # seconds of a call; then its result is an error, and what comes later is dropped
    max_tokens: Count | None = None  # of a result, the rest is cut off; None: rollout.max_passage_tokens
    concurrency: SmallCount = 8  # calls at once; when as many others hang beyond their timeout, no more are begun

    def check(self) -> None:
        given = [key for key in ("function", "url", "chat_url") if getattr(self, key) is not None]
        if len(given) != 1:
            expected = "function, FILE.py:FUNCTION, or url, a server, or chat_url, a chat model's"
            raise FieldError("function", f"expected one of {expected}, got {' and '.join(given) or 'none'}")
        if (self.chat_url is None) != (self.model is None):
            raise FieldError("model", "expected the chat model's name with chat_url, and none without")
        if self.template is not None and self.chat_url is None:
            raise FieldError("template", "expected none without chat_url, for no prompt is sent")
        if self.function is not None and not re.fullmatch(r".+\.py:[^\W\d]\w*", self.function):
            raise FieldError("function", f"expected FILE.py:FUNCTION, got {shown(self.function)}")


@dataclass(frozen=True, kw_only=True)
class GrpoSection(Section):
    """[grpo] from rewards to the loss; symbols as in kernels/loss.py."""

    # grpo, dr_grpo, dapo, cispo, gspo, sapo, gmpo, dppo, dppo_kl, reinforce, rloo, reinforce++ (docs/objectives.md), or
    # FILE.py:FUNCTION, a surrogate of one's own
    objective: str = "grpo"
    baseline: Literal["group", "leave_one_out", "batch", "none"] = "group"  # what advantages are rewards against
    scale: Literal["group", "batch", "none"] = "group"  # whose deviation advantages are divided by
    # whose reward a token's advantage is of: its trajectory's; turn: its turn's and all later ones' (return-to-go);
    # anchor: both its trajectory's and its turn's among turns from one state; token: and the spans that a reward names;
    # tree: the leaves below its turn, for rollout.trees (docs/objectives.md)
    advantage: Literal["trajectory", "turn", "anchor", "token", "tree"] = "trajectory"
    gamma: Share = 1.0  # of turn and anchor: a later turn's reward counts gamma times, for each turn between
    omega: NotNegative32 = 1.0  # of anchor: weight of the turn's part
    across: NotNegative32 = 1.0  # of tree: weight of the comparison with the other trees, beside that within the tree
    anchor: Literal["context", "observation"] = "context"  # a turn's state: all before it, or what came since the last
    clip_low: Share = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: NotNegative32 = 0.2  # see clip_low
    tau_positive: Positive = 1.0  # sapo's temperature of tokens with advantage > 0
    tau_negative: Positive = 1.05  # sapo's temperature of the others
    divergence: NotNegative32 = 0.15  # dppo's delta: beyond it a token that leads away has no gradient
    # llds: a penalty where the likelihood of a turn falls that was not worse than its group's mean; llds_positive: that
    # was better
    guard: Literal["none", "llds", "llds_positive"] = "none"
    guard_weight: NotNegative32 = 0.2  # of the guard, LLDS's lambda
    overlong_tokens: Natural = 0  # DAPO's buffer: a reward falls by up to 1 over the last so many tokens of a length
    dual_clip: Annotated[float, Within(1, 3.4e38, open_low=True)] | None = None  # bounds the ratio if advantage < 0
    kl_value: Estimator = "k3"  # estimator of the KL that is added to the loss and logged
    kl_gradient: Estimator | None = None  # estimator whose gradient is taken; None: that of kl_value
    beta: NotNegative32 = 1e-3  # weight of the KL; 0 needs no reference model
    entropy_coef: NotNegative32 = 0.0  # weight of the entropy, which is subtracted from the loss
    aggregation: Literal["trajectory", "token", "constant"] = "trajectory"  # what the loss is a mean over
    aggregation_constant: Annotated[float, Within(1e-3, 1e9)] | None = (
        None  # "constant" divides a trajectory's sum by so many tokens
    )
    std_floor: Positive = 1e-6  # advantages are divided by max(std, std_floor) + std_eps
    std_eps: NotNegative = 0.0  # see std_floor; TRL's, and so ARENA's code's, is 1e-4
    sample_std: bool = False  # divide by n - 1 instead of n
    drop_zero_advantage: bool = False  # leave trajectories of advantage 0 out of the update; they count in N
    # whether groups without a signal count in what the loss is a mean over; if not, they are not trained on either
    count_zero_advantage_groups: bool = True
    refill: bool = False  # DAPO's dynamic sampling: other questions for groups without a signal (docs/objectives.md)
    refill_rounds: Count = 10  # of sampling in a step at most, the first included, with refill
    reference: Literal["auto", "device", "cpu"] = "auto"  # where its weights lie; cpu: copied layer by layer
    updates_per_batch: Count = 1  # optimiser steps per pass over a rollout batch, whole groups split among them
    epochs_per_batch: Count = 1  # passes over a rollout batch, all in one order (PPO's epochs)
    old_logprobs: Literal["rollout", "recomputed"] = "rollout"  # recorded when sampled, or computed by the update
    tis_level: Literal["none", "token", "sequence"] = "none"  # weights recomputed/rollout, of a token or a context
    tis_rule: Literal["truncate", "mask"] = "truncate"  # beyond the cap: the cap, or 0 (and 0 below the floor)
    tis_cap: Annotated[float, Within(1)] = 2.0  # the largest weight
    tis_floor: Share | None = None  # of "mask", the smallest; None: 1 / tis_cap
    shuffle_rewards: bool = False  # the control: rewards shuffled within each group

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
            raise FieldError("dual_clip", f"expected none with objective = {shown(self.objective)}; {takers} have it")
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
                f'expected "recomputed" with tis_level = "{self.tis_level}", for with "rollout" the ratio holds the '
                "weight already",
            )
        if self.tis_floor is not None and self.tis_rule != "mask":
            raise FieldError("tis_floor", 'expected none with tis_rule = "truncate", which has no floor')
        if self.tis_level != "none" and self.tis_rule == "mask" and self.tis_cap == 1:
            raise FieldError("tis_cap", 'expected more than 1 with tis_rule = "mask", which drops what is beyond it')
        if self.guard != "none" and self.tis_level != "none" and self.tis_rule == "mask":
            raise FieldError(
                "tis_rule", f'expected "truncate" with guard = "{self.guard}", which goes by the sign of the advantage'
            )
        if self.reference == "cpu" and self.beta == 0:
            raise FieldError("reference", 'expected a beta > 0 with reference = "cpu", for at 0 there is no reference')


@dataclass(frozen=True, kw_only=True)
class OptimSection(Section):
    """[optim] AdamW on float32 weights. `lr`, `warmup_ratio`, `schedule`, `schedule_steps` are GRPO's, the rest SFT's
    too."""

    lr: NotNegative = 1e-6  # learning rate
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)  # decay of AdamW's first and second moment
    eps: Annotated[float, Within(1e-30)] = 1e-8  # of AdamW, added to the root of the second moment
    weight_decay: NotNegative = 0.0  # of AdamW, decoupled
    warmup_ratio: BelowOne = 0.0  # share of the steps over which the learning rate rises
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # of lr, after the warm-up; 0 after the last step
    schedule_steps: Count | None = None  # steps of warm-up and schedule together; None: run.steps
    max_grad_norm: Annotated[float, Within(0, math.inf, open_low=True)] = 1.0  # of gradients; inf: no clipping
    micro_batch_tokens: Count = 16384  # trajectories are packed into one forward up to so many tokens
    attention: Attention = "auto"  # backend of attention, forward and backward
    share_prefix: bool = True  # compute a prefix that trajectories share once, where that saves time
    loss_workspace_bytes: Count | None = None  # of the loss; None: 256 MiB on a CPU, 560 on CUDA (docs/loss.md)
    checkpoint_activations: Literal["auto", "on", "off"] = "auto"  # on: recomputed in backward; auto: by plan
    optimizer_state_dtype: Literal["float32", "8bit"] = (
        "float32"  # of AdamW; 8bit: in blocks, 2 bytes a weight in place of 8
    )
    offload: Literal["none", "moments", "masters"] = "none"  # to CPU memory: moments, or float32 masters with them


@dataclass(frozen=True, kw_only=True)
class RunSection(Section):
    """[run] the number of steps, and how often a run evaluates, saves and stores."""

    steps: Natural = 100  # of GRPO, a rollout each
    token_budget: Count | None = None  # tokens prefilled, sampled and computed in updates at which it ends before
    seed: Annotated[int, Within(0, 2**63 - 1)] = 0  # of all random draws
    eval_every: Count | None = None  # steps between evaluations; None: only before and after
    eval_questions: Count | None = None  # the first so many of data.dev; None: all
    save_every: Count = 50  # steps between checkpoints
    keep_checkpoints: Count = 2  # number of newest ones, besides the best
    best_metric: str | None = None  # measure of evaluations that the best checkpoint has; None: em, or reward without
    threads: Literal["auto"] | Annotated[int, Within(1, 4096)] = "auto"  # of torch on a CPU; see engine/threads.py
    keep_trajectories: Natural = 1  # trajectories of every so-many-th step are written; 0: of none
    token_stats_mib: Natural = 256  # MiB for the log-probs beside stored trajectories, the oldest deleted; 0: none
    verify: bool = True  # hold checkpoints and indexes against their hashes as they are read
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()  # trackers that get the metrics as well
    async_: bool = False  # with torchrun: half of the ranks sample the next batch while the others train on this one

    def check(self) -> None:
        if len(set(self.trackers)) < len(self.trackers):
            raise FieldError("trackers", f"expected each once, got {shown(list(self.trackers))}")


@dataclass(frozen=True, kw_only=True)
class SftSection(Section):
    """[sft] supervised fine-tuning, on segmented transcripts or on questions with their answers.

    With a gate, copying accuracy on the held-out transcripts is measured every `gate_every` steps: training ends at
    the first that reaches `stop_at_copy_accuracy`, and starts over from another seed if `steps` pass without one.
    """

    transcripts: str | None = None  # JSONL of segmented transcripts
    data: str | None = None  # or JSONL of questions, whose first gold answer is trained
    format: Literal["qa", "closed-book", "direct", "reasoning"] = "qa"  # of data: docs/sft.md
    answer: Literal["tagged", "plain"] = "tagged"  # of data: `<answer>gold</answer>`, or the bare gold
    template: str | None = None  # of data: file that replaces the format's own prompt template
    steps: Count = 1000  # optimiser steps at most
    batch_size: SmallCount = 32  # transcripts a step
    lr: NotNegative = 1e-5  # learning rate
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # of the learning rate, after the warm-up
    warmup_ratio: BelowOne = 0.0  # share of the steps over which the learning rate rises
    held_out: BelowOne = 0.05  # share of the transcripts that is measured and never trained on
    stop_at_copy_accuracy: Share | None = (
        None  # share of names copied right at which training ends; None: it takes all steps
    )
    gate_every: Count = 50  # steps between measurements of copying accuracy
    min_steps: Natural = 0  # no measurement before this step
    max_restarts: Natural = 2  # new attempts, each from another seed, where the accuracy is not reached
    save_every: Count = 200  # steps between checkpoints, from which a killed run goes on by --resume

    def check(self) -> None:
        if (self.transcripts is None) == (self.data is None):
            got = "neither" if self.data is None else "both"
            raise FieldError("transcripts", f"expected either transcripts or data, questions, got {got}")
        if self.format == "reasoning" and (self.template is not None or self.answer != "tagged"):
            raise FieldError("format", "reasoning has its system's template and tags; leave out template and answer")
        if self.stop_at_copy_accuracy is not None and self.held_out == 0:
            raise FieldError("held_out", "expected a number > 0 where there is a gate, got 0.0")

    @classmethod
    def wants(cls) -> str:
        return "transcripts or data"


@dataclass(frozen=True, kw_only=True)
class JudgeSection(Section):
    """[judge] the judges of rewards and measures: a classifier for entailment, a chat model for verdicts."""

    entailment: str | None = None  # folder of an NLI classifier; None: overlap of words, the stated stand-in
    labels: tuple[str, ...] | None = None  # of the classifier's outputs, in order, where its config.json has none
    max_tokens: Count | None = None  # of premise and hypothesis together; None: as many as the classifier can take
    batch_tokens: Count | None = None  # padded tokens of one forward; None: what suits the device
    device: Literal["cpu", "cuda"] = "cpu"  # of the classifier
    cache_size: Natural = 65_536  # judged pairs kept in memory
    # of a server that speaks OpenAI's /v1/chat/completions, for verdicts: of all answers in `eval`, and in `train`
    # where the system is rewarded by them
    url: str | None = None
    model: str | None = None  # the chat model's name there
    prompt: str = "lenient"  # of verdicts: lenient, strict, or a file with {golds} and {response}
    key_env: str | None = None  # environment variable that holds the key; the key itself never stands in a recipe
    timeout: Positive = 120.0  # seconds that one reply may take
    retry_seconds: NotNegative = 300.0  # seconds that the server may stay away
    concurrency: SmallCount = 4  # requests under way at once
    replies: str | None = None  # JSONL file that keeps all replies, so that none is paid for twice

    def check(self) -> None:
        if self.labels is not None and self.entailment is None:
            raise FieldError("labels", "expected none without entailment, the classifier that they belong to")
        if (self.url is None) != (self.model is None):
            missing, given = ("url", "model") if self.url is None else ("model", "url")
            raise FieldError(missing, f"expected a string, as there is a {given}, got nothing")
        # A user who put the key itself here must not see it printed.
        if self.key_env is not None and not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", self.key_env):
            raise FieldError("key_env", "expected the name of an environment variable such as API_KEY, not a key")


Target = Literal[
    "q", "k", "v", "o", "gate", "up", "down", "linear_qkv", "linear_z", "linear_b", "linear_a", "linear_out"
]
TARGETS: tuple[Target, ...] = get_args(Target)


@dataclass(frozen=True, kw_only=True)
class LoraSection(Section):
    """[lora] low-rank adapters in place of all weights, for `sft` and `train`; without the section all are trained."""

    rank: SmallCount = 16  # of an adapter's two factors
    alpha: Positive = 32.0  # what the adapters add is scaled by alpha / rank
    # projections of a layer that get an adapter, as far as it has them; linear_*: of layers with the gated delta rule
    targets: tuple[Target, ...] = TARGETS
    seed: Annotated[int, Within(0, 2**63 - 1)] = 0  # of the adapters' first values

    def check(self) -> None:
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise FieldError("targets", f"expected at least one, each once, got {shown(list(self.targets))}")
