"""What both sides of `thresher bench rollout` start from: one model, and texts of exactly the lengths of the shape.

Texts are words of an invented world's facts, and full stops at the end that fill them up to their length. The
vocabulary is trained on the same facts, so that it has exactly as many tokens as the model has columns: both sides
then draw from the same distribution. Nothing here knows which side runs.

Deliberately absent: an end of text in the model's config, so that every sample has its full length.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from thresher.bench.rollout.shapes import RolloutShape
from thresher.engine.world.facts import Size, invent, passages
from thresher.engine.world.random_model import END_OF_TEXT
from thresher.policy.config import config_from_dict
from thresher.policy.model import Policy, init_policy
from thresher.policy.tokenizer import Tokenizer, load_tokenizer, train_bpe

CONTEXT, ROPE_THETA = 4096, 10_000.0
WORLD = Size(warmup_worlds=0, people=800, places=600, works=800, pieces=400)  # enough words for every vocabulary
FILL = "."
TRAINED = 1200  # tokens of a vocabulary that come from text


@dataclass(frozen=True, slots=True)
class RolloutSetting:
    """The model, and for every question its text, that of its passages, and one to append behind each turn but the
    last."""

    shape: RolloutShape
    tokenizer: Tokenizer
    policy: Policy
    questions: list[str]
    passages: list[str]
    appended: list[list[str]]

    def question_ids(self) -> list[list[int]]:
        return [self.tokenizer.encode(text) for text in self.questions]

    def prompts(self) -> list[list[int]]:
        """Question and passages, as ids."""
        encode = self.tokenizer.encode
        return [encode(text) + encode(given) for text, given in zip(self.questions, self.passages, strict=True)]


def make_rollout_setting(
    shape: RolloutShape, device: torch.device | None = None, policy: Policy | None = None, vocab: int | None = None
) -> RolloutSetting:
    """A function of the shape, its seed included; the model in float32 on the device.

    policy: a model that was made already. vocab: tokens of the tokenizer, where they are not `sizes.vocab_size`.
    """
    facts = invented_facts(shape.seed)
    tokenizer = make_tokenizer(facts, vocab or shape.sizes.vocab_size)
    if policy is None:
        config = json.loads((files("thresher.recipes") / "demo" / "config.json").read_text(encoding="utf-8"))
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
    """Sentences, enough for a vocabulary of `TRAINED` tokens."""
    return [passage.text for passage in passages([invent(WORLD, seed).train], seed)]


def make_tokenizer(facts: Sequence[str], vocab: int) -> Tokenizer:
    """A tokenizer of exactly `vocab` tokens. From `TRAINED` on they are trained on no text: no text is encoded into
    them, and each decodes to its number, so that a large head has a tokenizer of its size."""
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
    """A text of exactly so many tokens, from facts that `rng` draws."""
    return _text_of(tokens, " ".join(rng.sample(facts, 1 + tokens // 4)).split(), tokenizer)


def _text_of(tokens: int, words: Sequence[str], tokenizer: Tokenizer) -> str:
    """The first of the words, as many as fit, and what fills them up to exactly `tokens`."""
    text, rest = "", tokens
    for word in words:
        longer = f"{text} {word}".strip()
        left = tokens - len(tokenizer.encode(longer))
        if left < 0:
            break
        text, rest = longer, left
    text += FILL * rest
    if len(tokenizer.encode(text)) != tokens:
        raise RuntimeError(f"a text of {tokens} tokens could not be made")
    return text
