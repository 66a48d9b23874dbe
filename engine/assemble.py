"""Load all that a recipe's rollout needs, and check that the parts fit together before anything is computed."""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from pathlib import Path

import torch

from thresher.common.console import note
from thresher.common.errors import UserError
from thresher.engine.config.recipe import Recipe, load_recipe
from thresher.engine.config.sections import DataSection, RetrievalSection, SystemSection
from thresher.engine.decoding.decoder import ring_of, states_bytes
from thresher.engine.decoding.decoder_cuda import free_memory, memory_left
from thresher.engine.decoding.kv_cache import PagedKV
from thresher.engine.episode import EpisodeConfig, System, read_template
from thresher.engine.protocol.prompts import Renderer
from thresher.engine.rollout.rollout import Limits, Rollout
from thresher.engine.rollout.tools import Toolbox, load_tools
from thresher.engine.scoring.judges import load_judge, load_verdicts
from thresher.engine.scoring.score import Judges
from thresher.engine.systems import load_system, own_digest, preset_of
from thresher.engine.threads import threads_for, use_threads
from thresher.kernels.attention.backends.choice import Backend
from thresher.policy.config import ModelConfig
from thresher.policy.model import Policy, attention_backend, load_policy
from thresher.policy.tokenizer import Tokenizer, load_tokenizer
from thresher.retrieval.questions import Question, read_questions
from thresher.retrieval.retriever import Retriever
from thresher.retrieval.serving.client import RemoteRetriever

# Heads are padded to a multiple of a number below this: Qwen2.5's 151,665 tokens have 151,936 or 152,064 rows.
PADDING = 1024
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptContext:
    """A system with its prompt, limits and tokenizer, for any writer of turns. system_digest: digest of a user's own
    system file, None for a built-in system."""

    recipe: Recipe
    tokenizer: Tokenizer
    system: System
    renderer: Renderer
    episode_config: EpisodeConfig
    limits: Limits
    system_digest: str | None = None
    tools: Toolbox = field(default_factory=Toolbox)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext(PromptContext):
    """The loaded parts of a run. `vocab_size` is the tokenizer's: columns beyond it are neither sampled nor trained."""

    policy: Policy

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    def threads(self) -> AbstractContextManager[None]:
        """Return a context in which torch uses the recipe's number of threads, or one that suits the model."""
        return use_threads(threads_for(self.recipe.run.threads, self.policy.config))

    def rollout(self, retriever: Retriever | None) -> Rollout:
        limits = self.limits
        blocks = Rollout.blocks_for(limits)
        if limits.attention != "torch":
            # On a GPU the cache is as large as the free memory allows, and must hold one context.
            blocks = 1 + -(-limits.max_context // limits.kv_block_size)
        needed = PagedKV.bytes_needed(self.policy.config, blocks, limits.kv_block_size, self.policy.dtype.itemsize)
        available = free_memory(self.policy.device)
        if needed > available:
            raise UserError(
                f"the KV cache for {(blocks - 1) * limits.kv_block_size} tokens, by rollout.max_num_seqs = "
                f"{limits.max_num_seqs} and rollout.max_context = {limits.max_context}, takes "
                f"{needed / 2**30:.3g} GiB, and {memory_left(self.policy.device)}; lower one of them, or set "
                "rollout.kv_tokens"
            )
        ring = ring_of(bool(limits.num_draft_tokens), self.policy.device.type == "cuda")
        states = states_bytes(self.policy.config, self.policy.dtype.itemsize, limits.max_num_seqs, ring)
        if states + needed > available:
            raise UserError(
                f"the states of rollout.max_num_seqs = {limits.max_num_seqs} sequences take {states / 2**30:.3g} GiB "
                f"on top of a KV cache of {needed / 2**30:.3g}, and {memory_left(self.policy.device)}; lower it"
            )
        shuffle = (self.recipe.retrieval or RetrievalSection()).shuffle
        return Rollout(
            self.policy,
            self.tokenizer,
            retriever,
            self.system,
            self.episode_config,
            self.renderer,
            limits,
            shuffle=shuffle,
            tools=self.tools,
        )


def load_run_context(recipe: Recipe, model_path: str | Path | None = None, system: System | None = None) -> RunContext:
    """Load policy, tokenizer and system of a recipe. model_path, system: used in place of those of the recipe."""
    folder = Path(recipe.model.path if model_path is None else model_path)
    tokenizer = load_tokenizer(folder, recipe.run.verify)
    context = make_prompt_context(recipe, tokenizer, system)
    policy = load_on_device(recipe, folder)
    check_fit(policy, tokenizer, folder)
    if doubts := fit_doubts(policy, tokenizer, folder):
        note(doubts)
    attention = rollout_attention(recipe, policy)
    if recipe.model.prompt == "chat" and tokenizer.chat_template is None:
        raise UserError(f'{folder}: model.prompt is "chat", but the model has no chat template; set it to "raw"')
    check_positions(recipe, policy.config)
    known = {field.name: getattr(context, field.name) for field in fields(context)}
    return RunContext(policy=policy, **known | {"limits": replace(context.limits, attention=attention)})


def check_positions(recipe: Recipe, config: ModelConfig) -> None:
    """Raise UserError if episodes may be longer than the context that the model was made for."""
    if recipe.rollout.max_context > config.max_position_embeddings:
        raise UserError(
            f"rollout.max_context is {recipe.rollout.max_context}, but the model was made for "
            f"{config.max_position_embeddings} positions; lower it"
        )


def make_prompt_context(recipe: Recipe, tokenizer: Tokenizer, system: System | None = None) -> PromptContext:
    """Return a recipe's system, or `system` in its place, with its prompt, limits, and this tokenizer."""
    section, rollout = recipe.need(SystemSection), recipe.rollout
    digest = own_digest(section.name) if system is None else None
    system = system or load_system(section.name, section.options)
    template = system.template
    if section.template is not None:
        template = read_template(section.template, "{passages}" in template)
    retrieval = recipe.retrieval or RetrievalSection()
    if missing := [name for name in system.tools if name not in (recipe.tools or {})]:
        raise UserError(
            f"{system.name} calls the tool {missing[0]}, which the recipe does not name; add a section "
            f'[tools.{missing[0]}] with function = "FILE.py:FUNCTION" or the url of a server'
        )
    return PromptContext(
        recipe=recipe,
        tokenizer=tokenizer,
        system=system,
        renderer=Renderer(
            tokenizer=tokenizer,
            tags=system.tags,
            k=retrieval.k,
            chat=recipe.model.prompt == "chat",
            max_passage_tokens=rollout.max_passage_tokens,
            passage_format=retrieval.passage_format,
        ),
        episode_config=EpisodeConfig(template, rollout.max_turns, rollout.max_passage_tokens + rollout.max_turn_tokens),
        limits=Limits(
            max_turn_tokens=rollout.max_turn_tokens,
            max_policy_tokens=rollout.max_policy_tokens or rollout.max_context,
            max_context=rollout.max_context,
            max_num_seqs=rollout.max_num_seqs,
            kv_block_size=rollout.kv_block_size,
            kv_tokens=rollout.kv_tokens,
            share_prefix=rollout.share_prefix,
            num_draft_tokens=rollout.num_draft_tokens,
        ),
        system_digest=digest,
        tools=load_tools(recipe.tools, rollout.tools_replay, note, recipe.run),
    )


def tools_digest(recipe: Recipe) -> str | None:
    """Return the SHA-256, in hex, of the files of a recipe's tools; None if there are none, or if no tool is called."""
    tools = (recipe.tools or {}).values()
    functions = [tool.function for tool in tools if tool.function is not None]
    prompts = [tool.template for tool in tools if tool.template is not None]
    if not (functions or prompts) or recipe.rollout.tools_replay is not None:
        return None
    digests = [own_digest(function.rpartition(":")[0]) for function in functions]
    digests += [sha256(Path(prompt).read_bytes()).hexdigest() for prompt in prompts]
    return sha256(repr(digests).encode()).hexdigest()


def load_on_device(recipe: Recipe, folder: str | Path) -> Policy:
    if recipe.model.device == "cuda" and not torch.cuda.is_available():
        raise UserError("model.device is cuda, but torch sees no CUDA device; give --device cpu")
    return load_policy(folder, DTYPES[recipe.model.dtype], recipe.model.device, recipe.run.verify)


def check_fit(policy: Policy, tokenizer: Tokenizer, folder: str | Path) -> None:
    """Raise UserError if the tokenizer belongs to another model: it has ids that the head does not, or lacks a token
    that ends or begins the model's texts."""
    if tokenizer.vocab_size > policy.config.vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, the model's head only "
            f"{policy.config.vocab_size}; use the tokenizer that belongs to the model"
        )
    for key, token in _text_marks(policy):
        if token >= tokenizer.vocab_size:
            raise UserError(
                f"{folder}: {key} is {token}, but the tokenizer has only {tokenizer.vocab_size} tokens; use the "
                "tokenizer that belongs to the model, or correct the id in config.json and generation_config.json"
            )


def fit_doubts(policy: Policy, tokenizer: Tokenizer, folder: str | Path) -> str | None:
    """Return a sentence on why the tokenizer may be of another model though `check_fit` passes; None if it looks right.

    Published models mark the ends of texts by added tokens, and have no more rows than padding explains.
    """
    rows, added = policy.config.vocab_size, set(tokenizer.added_tokens.values())
    padded = -(-tokenizer.vocab_size // PADDING) * PADDING
    found = [
        f"{key} {token} is not an added token of the tokenizer but the text {tokenizer.decode([token])!r}"
        for key, token in _text_marks(policy)
        if token not in added
    ]
    if rows > padded:
        found.append(f"the model's head has {rows:,} rows, the tokenizer only {tokenizer.vocab_size:,} tokens")
    return f"{folder}: {', and '.join(found)}; check that the tokenizer is the model's" if found else None


def _text_marks(policy: Policy) -> list[tuple[str, int]]:
    """Return the ids that end and begin texts, each with its key in config.json. The padding token is not used."""
    config = policy.config
    begin = [] if config.bos_token_id is None else [("bos_token_id", config.bos_token_id)]
    return [*(("eos_token_id", token) for token in config.eos_token_ids), *begin]


def rollout_attention(recipe: Recipe, policy: Policy) -> Backend:
    """Return the backend of a rollout's attention. UserError if the recipe's backend cannot serve this model here."""
    return attention_backend(policy, recipe.rollout.attention, "rollout", "rollout.")


def load_retrieval(recipe: Recipe, system: System) -> Retriever | None:
    """Return the recipe's index, or its server once that answers; None if it names neither. UserError if k is too
    large, or if the system needs an index and there is none."""
    section = recipe.retrieval
    if section is None or (section.index is None and section.url is None):
        if system.needs_index:
            raise UserError(
                f"{system.name} searches, but the recipe names no index or server; set retrieval.index to a folder or "
                "retrieval.url to a server"
            )
        return None
    retriever: Retriever
    if section.url is not None:
        note(f"searches go to {section.url}")
        retriever = RemoteRetriever(section.url, timeout=section.timeout, patience=section.patience, say=note)
    else:
        # Imported here because a run with a server does not need FAISS.
        from thresher.retrieval.indexes.load import load_retriever

        assert section.index is not None  # it has no url
        retriever = load_retriever(section.index, verify=recipe.run.verify)
    retriever.check_k(section.k)
    return retriever


def load_judges(
    recipe: Recipe, system: System, replies: Path, allow_keys: Collection[str], rewarded_only: bool = False
) -> Judges:
    """Return the judges of a recipe. There is an entailment judge if the system has claims. There is a chat model if
    the system's reward needs it or, unless `rewarded_only`, if the recipe names one. replies: file of its replies,
    unless the recipe names one. allow_keys: as in `load_endpoint`."""
    section = recipe.judge
    if section.replies is None:
        section = replace(section, replies=str(replies))
    asked = system.wants_verdict or (section.url is not None and not rewarded_only)
    return Judges(
        entailment=load_judge(section) if system.claims is not None else None,
        verdict=load_verdicts(section, allow_keys, note) if asked else None,
    )


def load_questions(recipe: Recipe, system: System) -> tuple[list[Question], list[Question]]:
    """Read training questions (up to data.limit) and development questions (up to run.eval_questions; may be empty)."""
    data = recipe.need(DataSection)
    train = read_questions(data.train, golds_needed=system.needs_golds)[: data.limit]
    check_gold_indices(train, system, data.train, needed=True)
    if data.dev is None:
        return train, []
    dev = read_questions(data.dev, golds_needed=system.needs_golds)[: recipe.run.eval_questions]
    check_gold_indices(dev, system, data.dev)
    return train, dev


def check_gold_indices(questions: Sequence[Question], system: System, path: str, needed: bool = False) -> None:
    """Print how many questions have unknown gold passages, if the system's reward needs them. UserError if this is true
    of all questions and `needed` is set."""
    unknown = sum(question.gold_indices is None for question in questions)
    if not system.needs_gold_indices or not unknown:
        return
    if needed and unknown == len(questions):
        raise UserError(
            f"{path}: no question says which of its passages are gold, but {system.name} is rewarded for naming them; "
            "give questions with passages and gold_indices, as thresher data convert makes from HotpotQA"
        )
    note(
        f"{path}: {unknown:,} of {len(questions):,} questions do not say which of their passages are gold; there "
        f"{system.name} earns nothing for naming some"
    )


def read_run_recipe(path: str | Path, overrides: list[str]) -> Recipe:
    """Return a recipe completed by the preset of its system. Values of the file and the overrides take precedence."""
    return load_recipe(path, overrides, preset=preset_of)
