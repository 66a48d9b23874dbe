"""Shapes and texts of `thresher bench rollout` and `thresher bench step`: one model and texts of exact lengths.

Texts are words of an invented world's facts, padded with full stops or the like. The vocabulary is trained on the same
facts and has exactly as many tokens as the model has columns, so that all sides sample from the same distribution; a
published model has its own. The model's config has no end of text, so that every sample has its full length.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from thresher.bench.decode import UNDRAWN, random_policy
from thresher.bench.roofline import GROUP, MODELS, STEP_PROMPT, STEP_QUESTIONS, STEP_SAMPLED
from thresher.common.errors import UserError
from thresher.engine.world.facts import Size, invent, passages
from thresher.engine.world.random_model import END_OF_TEXT
from thresher.policy.config import config_from_dict
from thresher.policy.model import Policy, init_policy, load_policy
from thresher.policy.tokenizer import Tokenizer, load_tokenizer, train_bpe

CONTEXT, ROPE_THETA = 4096, 10_000.0
WORLD = Size(warmup_worlds=0, people=800, places=600, works=800, pieces=400)  # enough words for every vocabulary
FILLS = (".", " a", " 1", "e")  # texts are padded with one of these that is always a single token, also when repeated
TRAINED = 1200  # tokens of a vocabulary that are trained on text


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a Qwen2 or another family's model. Its random weights are small enough that the float32 angles of
    transformers' rotation, the largest difference between two correct implementations at position 1,000, stay below the
    limit of the check."""

    model_type: str = "qwen2"
    num_hidden_layers: int = 4
    hidden_size: int = 256
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    intermediate_size: int = 768
    vocab_size: int = 1200
    initializer_range: float = 0.04


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridSizes(Sizes):
    """The sizes of a Qwen3.5: three layers with the gated delta rule for each with full attention. The heads are
    0.8B's."""

    model_type: str = "qwen3_5_text"
    num_hidden_layers: int = 4
    hidden_size: int = 1024
    intermediate_size: int = 3584
    num_attention_heads: int = 8
    head_dim: int = 256
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 16
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    partial_rotary_factor: float = 0.25
    initializer_range: float = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutShape:
    """Lengths in tokens. A prompt is `question` and `passages`. The `turns` are sampled in sequence, with `appended`
    tokens of passage between them. With `branches` there are three turns, EviOmni's reason, evidence and answer, and
    two more answers, in contexts that hide a part: (q, P, r) and (q, e)."""

    name: str
    sizes: Sizes
    questions: int
    group: int
    question: int
    turns: tuple[int, ...]
    passages: int = 0
    appended: int = 0
    branches: bool = False
    seed: int = 0

    @property
    def prompt(self) -> int:
        return self.question + self.passages

    @property
    def samples(self) -> int:
        return self.questions * self.group

    @property
    def sampled(self) -> int:
        """Return the tokens sampled for one sample, including its branches."""
        return sum(self.turns) + (2 * self.turns[-1] if self.branches else 0)

    @property
    def tokens(self) -> int:
        """Return the tokens sampled in a round."""
        return self.samples * self.sampled

    @property
    def longest(self) -> int:
        """Return the tokens of the whole trajectory."""
        return self.prompt + sum(self.turns) + self.appended * (len(self.turns) - 1)

    @property
    def contexts(self) -> tuple[int, ...]:
        """Return the lengths of the contexts submitted for a sample, the prompt first: one per turn and branch."""
        if self.branches:
            reason, evidence, _ = self.turns
            hidden = (self.prompt + reason, self.question + evidence)
            return (self.prompt, self.prompt + reason + evidence, *hidden)
        return tuple(
            accumulate(self.turns[:-1], lambda length, turn: length + turn + self.appended, initial=self.prompt)
        )

    @property
    def asked(self) -> int:
        """Return the tokens of context submitted in a round."""
        return self.samples * sum(self.contexts)

    def record(self) -> dict[str, Any]:
        """Return the lengths in the format of a row."""
        sizes = self.sizes
        lengths = {name: getattr(self, name) for name in ("questions", "group", "prompt", "appended")}
        model = {"layers": sizes.num_hidden_layers, "hidden": sizes.hidden_size, "vocab": sizes.vocab_size}
        return {**lengths, "turns": list(self.turns), **model}


_DEMO = Sizes(num_hidden_layers=2, hidden_size=96, intermediate_size=192, vocab_size=768, initializer_range=0.08)
_RAG = Sizes()

# demo: the demo's model, short prompts. rag: a prompt full of passages, for a short answer and for a reasoned one.
# search: a passage is appended after the first and the second turn. tail: its turn is the maximum of unequal sample
# lengths (rollout_tail.py), an eighth of 256 slots, 1,000 tokens at most and 300 in the mean.
ROLLOUT_SHAPES: dict[str, tuple[RolloutShape, ...]] = {
    "demo": (RolloutShape(name="demo", sizes=_DEMO, questions=16, group=8, question=40, turns=(64,)),),
    "rag": tuple(
        RolloutShape(name="rag", sizes=_RAG, questions=asked, group=8, question=40, passages=660, turns=(tokens,))
        for tokens, asked in ((48, 8), (200, 4))
    ),
    "search": (
        RolloutShape(name="search", sizes=_RAG, questions=8, group=5, question=150, turns=(40, 40, 40), appended=250),
    ),
    "branches": (
        RolloutShape(
            name="branches",
            sizes=_RAG,
            questions=4,
            group=8,
            question=120,
            passages=700,
            turns=(200, 60, 16),
            branches=True,
        ),
    ),
    "tail": tuple(
        RolloutShape(name="tail", sizes=sizes, questions=4, group=8, question=24, turns=(125,))
        for sizes in (_DEMO, _RAG)
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerWay:
    """How a peer computes an update. batch: samples in one forward and backward (None: all of a step), accumulated over
    the step. checkpointing: activations are recomputed in the backward."""

    batch: int | None = None
    checkpointing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """One GRPO step. model: a name of roofline.MODELS in bfloat16, for CUDA; None: `lengths.sizes` in float32. lora:
    rank of adapters, the only trained weights. micro_batch_tokens: of our update. peer_ways: if there are several, each
    is tried, and the fastest is the peer.

    TRL's GRPOTrainer has no retrieval between turns. In `search` its prompt is as long as ours with all passages, and
    it samples as many tokens in one turn: the same number of sampled and given tokens per trajectory.
    """

    lengths: RolloutShape
    model: str | None = None
    lora: int | None = None
    beta: float = 0.02
    lr: float = 1e-5
    micro_batch_tokens: int = 16384
    peer_ways: tuple[PeerWay, ...] = (PeerWay(),)

    @property
    def name(self) -> str:
        return self.lengths.name

    @property
    def peer_prompt(self) -> int:
        """Return the prompt tokens of a single-turn peer: all given tokens of a trajectory."""
        return self.lengths.longest - sum(self.lengths.turns)

    @property
    def peer_completion(self) -> int:
        return sum(self.lengths.turns)

    @property
    def tokens(self) -> int:
        """Return the tokens of a step's trajectories, prompts and passages included, each counted for every sample."""
        return self.lengths.samples * self.lengths.longest

    def record(self) -> dict[str, Any]:
        """Return the lengths in the format of a row."""
        return self.lengths.record() | {"model": self.model, "lora": self.lora, "beta": self.beta, "lr": self.lr}


def _gpu(name: str, model: str, lora: int | None = None, micro_batch_tokens: int = 16384) -> StepShape:
    lengths = RolloutShape(
        name=name,
        sizes=Sizes(),
        questions=STEP_QUESTIONS,
        group=GROUP,
        question=STEP_PROMPT,
        turns=(STEP_SAMPLED,),
    )
    ways = (PeerWay(batch=32),)  # for 0.5B, all 64 at once take more than 80 GB
    return StepShape(lengths=lengths, model=model, lora=lora, micro_batch_tokens=micro_batch_tokens, peer_ways=ways)


_STEP_RAG = RolloutShape(name="rag", sizes=Sizes(vocab_size=20_000), questions=4, group=8, question=700, turns=(200,))
_SEARCH = RolloutShape(
    name="search", sizes=Sizes(), questions=4, group=5, question=150, turns=(100, 100, 100), appended=275
)
# SmolLM2-135M at the lengths of recipes/smollm2/read.toml.
_SMOLLM2 = RolloutShape(
    name="smollm2",
    sizes=Sizes(
        model_type="llama",
        num_hidden_layers=30,
        hidden_size=576,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        vocab_size=49_152,
    ),
    questions=8,
    group=8,
    question=210,
    turns=(32,),
)

STEP_SHAPES: dict[str, StepShape] = {
    "demo": StepShape(lengths=replace(ROLLOUT_SHAPES["demo"][0], question=56)),
    "rag": StepShape(lengths=_STEP_RAG),
    "search": StepShape(lengths=_SEARCH),
    "smollm2": StepShape(
        lengths=_SMOLLM2,
        beta=0.0,
        lr=3e-5,
        micro_batch_tokens=4096,
        peer_ways=(PeerWay(batch=16), PeerWay(batch=16, checkpointing=True)),
    ),
    "0.5B": _gpu("0.5B", "0.5B", micro_batch_tokens=32768),  # all tokens that an update computes
    "1.5B": _gpu("1.5B", "1.5B"),
    "7B-lora": _gpu("7B-lora", "7B", lora=16),
}


# Qwen3.5 at the lengths of a shape; of one question for 0.8B, cut to four layers.
_NARROW = HybridSizes(
    hidden_size=96,
    intermediate_size=192,
    num_attention_heads=4,
    head_dim=24,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=24,
    linear_value_head_dim=24,
    vocab_size=768,
    initializer_range=0.08,
)
_HYBRID = {"demo": _NARROW, "rag": HybridSizes(vocab_size=20_000), "search": HybridSizes()}


def shape_of_family(name: str, family: str) -> StepShape:
    """Return the shape `name` of STEP_SHAPES with a model of this family. UserError if there is none."""
    shape = STEP_SHAPES[name]
    if family == "qwen2":
        return shape
    if name not in _HYBRID:
        raise UserError(f"--family {family}: the shape {name} has no such model; expected one of {', '.join(_HYBRID)}")
    questions = shape.lengths.questions if name == "demo" else 1
    return replace(shape, lengths=replace(shape.lengths, sizes=_HYBRID[name], questions=questions))


@dataclass(frozen=True, slots=True)
class RolloutSetting:
    """The model and the texts of its questions. Each question has its text, that of its passages, and one to append
    after each turn but the last."""

    shape: RolloutShape
    tokenizer: Tokenizer
    policy: Policy
    questions: list[str]
    passages: list[str]
    appended: list[list[str]]

    def question_ids(self) -> list[list[int]]:
        return [self.tokenizer.encode(text) for text in self.questions]

    def prompts(self) -> list[list[int]]:
        """Return question and passages as ids."""
        encode = self.tokenizer.encode
        return [encode(text) + encode(given) for text, given in zip(self.questions, self.passages, strict=True)]


def make_rollout_setting(
    shape: RolloutShape,
    device: torch.device | None = None,
    policy: Policy | None = None,
    vocab: int | None = None,
    tokenizer: Tokenizer | None = None,
) -> RolloutSetting:
    """Make model and texts, a function of the shape with its seed; the model in float32 on the device.

    policy: an existing model. vocab: tokens of the tokenizer, if they are not `sizes.vocab_size`. tokenizer: a
    published model's.
    """
    facts = invented_facts(shape.seed)
    tokenizer = tokenizer or make_tokenizer(facts, vocab or shape.sizes.vocab_size)
    if policy is None:
        config = json.loads((files("thresher.recipes") / "demo" / "config.json").read_text(encoding="utf-8"))
        del config["architectures"]  # of the family, which `sizes` may change
        config |= asdict(shape.sizes) | {"max_position_embeddings": CONTEXT, "rope_theta": ROPE_THETA}
        config = config_from_dict(config, "the bench's config").replace(eos_token_ids=())
        policy = init_policy(config, shape.seed).to(device or "cpu").requires_grad_(False)
    rng = random.Random(shape.seed)

    def text(tokens: int) -> str:
        return text_of(tokens, facts, tokenizer, rng)

    return RolloutSetting(
        shape,
        tokenizer,
        policy,
        [text(shape.question) for _ in range(shape.questions)],
        [text(shape.passages) for _ in range(shape.questions)],
        [[text(shape.appended) for _ in shape.turns[1:]] for _ in range(shape.questions)],
    )


def invented_facts(seed: int) -> list[str]:
    """Return sentences, enough for a vocabulary of `TRAINED` tokens."""
    return [passage.text for passage in passages([invent(WORLD, seed).train], seed)]


def make_tokenizer(facts: Sequence[str], vocab: int) -> Tokenizer:
    """Train a tokenizer of exactly `vocab` tokens. Those from `TRAINED` on are fillers for the size of a large head: no
    text is encoded into them, and each decodes to its number."""
    tokenizer = train_bpe(facts, min(vocab, TRAINED), [END_OF_TEXT])
    if tokenizer.vocab_size != min(vocab, TRAINED):
        raise RuntimeError(f"the invented text gives {tokenizer.vocab_size} tokens, not {vocab}")
    if vocab <= TRAINED:
        return tokenizer
    with TemporaryDirectory() as folder:
        tokenizer.save(folder)
        file = Path(folder) / "tokenizer.json"
        data = json.loads(file.read_text(encoding="utf-8"))
        (end,) = data["added_tokens"]
        data["model"]["vocab"] |= {f"#{number}": number for number in range(end["id"], vocab - 1)}
        end["id"] = vocab - 1  # added tokens come last
        file.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
        return load_tokenizer(folder)


def text_of(tokens: int, facts: Sequence[str], tokenizer: Tokenizer, rng: random.Random) -> str:
    """Make a text of exactly `tokens` tokens from random facts: as many words as fit, padded with one of `FILLS`."""
    text, rest = "", tokens
    for word in " ".join(rng.sample(facts, 1 + tokens // 4)).split():
        longer = f"{text} {word}".strip()
        left = tokens - len(tokenizer.encode(longer))
        if left < 0:
            break
        text, rest = longer, left
    for fill in FILLS:
        if len(tokenizer.encode(text + fill * rest)) == tokens:
            return text + fill * rest
    raise RuntimeError(f"a text of {tokens} tokens could not be made")


@dataclass(frozen=True, slots=True)
class Seconds:
    """The times of one step: wall seconds, and CPU seconds of all of the process's threads."""

    rollout: float
    total: float
    rollout_cpu: float = 0.0
    total_cpu: float = 0.0

    @property
    def update(self) -> float:
        return self.total - self.rollout

    @property
    def update_cpu(self) -> float:
        return self.total_cpu - self.rollout_cpu


@dataclass(frozen=True, slots=True)
class StepSetting:
    """Model and texts of our side of a step, and prompts for a single-turn peer. The peer's prompts have as many tokens
    as ours with its passages. end: the token that a peer uses to end and pad texts."""

    shape: StepShape
    rollout: RolloutSetting
    peer_prompts: list[str]
    end: str = END_OF_TEXT

    @property
    def device(self) -> torch.device:
        return self.rollout.policy.device

    def peer_ids(self) -> list[list[int]]:
        return [self.rollout.tokenizer.encode(text) for text in self.peer_prompts]


def make_step_setting(
    shape: StepShape, device: torch.device | None = None, folder: str | Path | None = None
) -> StepSetting:
    """Make model and texts of a step, a function of the shape with its seed. folder: of a published model, in place of
    random weights."""
    lengths, device, end = shape.lengths, device or torch.device("cpu"), END_OF_TEXT
    if folder is not None:
        policy = load_policy(folder, torch.float32 if shape.model is None else torch.bfloat16, device)
        ends, tokenizer = policy.config.eos_token_ids, load_tokenizer(folder)
        end = tokenizer.decode(ends[:1] or [tokenizer.vocab_size - 1])
        policy.config = policy.config.replace(eos_token_ids=())
        rollout = make_rollout_setting(lengths, device, policy.requires_grad_(False), tokenizer=tokenizer)
    elif shape.model is None:
        rollout = make_rollout_setting(lengths, device)
    else:
        config = MODELS[shape.model]
        policy = random_policy(config, device, torch.bfloat16)
        rollout = make_rollout_setting(lengths, device, policy, config.vocab_size - UNDRAWN)
    if shape.peer_prompt == lengths.prompt:
        return StepSetting(shape, rollout, rollout.questions, end)
    rng, facts = random.Random(lengths.seed), invented_facts(lengths.seed)
    prompts = [text_of(shape.peer_prompt, facts, rollout.tokenizer, rng) for _ in range(lengths.questions)]
    return StepSetting(shape, rollout, prompts, end)


def reward_of(ids: Sequence[int]) -> float:
    """Return the share of odd ids: cheap, and different enough within a group to give every sample an advantage."""
    return sum(token % 2 for token in ids) / len(ids)
