"""The sides of `thresher bench rollout`: our Generator, our rollout with an episode, and transformers' two calls.

`generate` gets a group's prompt once per sample, padded on the left if lengths differ. `generate_batch` (continuous
batching) gets it once and shares it; it has a tenth more blocks than the call can fill, because on a CPU its attention
runs over all of them. Both sample from the full distribution, and each call starts with an empty cache. Transformers is
imported when its model is made.
"""

import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch

from thresher.bench.settings import RolloutSetting
from thresher.engine.decoding.generator import GenerateRequest, Generator
from thresher.engine.episode import (
    BranchPrompt,
    Episode,
    EpisodeConfig,
    Generate,
    KeptSpan,
    Prompt,
    Retrieved,
    Search,
    SpawnBranches,
    System,
)
from thresher.engine.protocol.prompts import Renderer
from thresher.engine.protocol.trajectory import Segment, Trajectory
from thresher.engine.rollout.rollout import Job, Limits, Rollout
from thresher.kernels.attention.backends.choice import resolve_attention
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question
from thresher.retrieval.retriever import Hit as Found
from thresher.retrieval.retriever import Retriever
from thresher.rewards.reward import RewardResult, Source

TEMPLATE = "{question}{passages}"
STOP = "</NotToBeSpelledByChance>"  # every turn has a fixed length, so its tag must not be sampled
PAD = 0
PAGE = 16
SPARE = 1.1  # blocks / those that can be filled: the scheduler of generate_batch keeps some free
BATCH_TOKENS = 2048  # maximum tokens of one forward of generate_batch

# contexts, samples of each, tokens of a sample -> ids of all samples, with those of a context adjacent
Ask = Callable[[list[list[int]], int, int], list[list[int]]]


def play(setting: RolloutSetting, ask: Ask) -> None:
    """Play one round by submitting every context anew, as users of `generate` and of our Generator do.

    After each turn of a search, the whole text so far is submitted again, with the passage appended. EviOmni's answers
    are sampled in three contexts, (q, P, r, e), (q, P, r) and (q, e). Raises RuntimeError for a sample of another
    length.
    """

    def checked(contexts: list[list[int]], copies: int, tokens: int) -> list[list[int]]:
        written = ask(contexts, copies, tokens)
        lengths = sorted({len(ids) for ids in written})
        if len(written) != len(contexts) * copies or lengths != [tokens]:
            raise RuntimeError(
                f"expected {len(contexts) * copies} samples of {tokens} tokens, got {len(written)} of {lengths}"
            )
        return written

    shape = setting.shape
    contexts, copies = setting.prompts(), shape.group
    if shape.branches:
        reason, evidence, answer = shape.turns
        written = checked(contexts, copies, reason + evidence)
        prompts, questions = _each(contexts, copies), _each(setting.question_ids(), copies)
        for before, part in ((prompts, slice(None)), (prompts, slice(reason)), (questions, slice(reason, None))):
            checked([context + ids[part] for context, ids in zip(before, written, strict=True)], 1, answer)
        return
    for turn, tokens in enumerate(shape.turns):
        written = checked(contexts, copies, tokens)
        if turn + 1 == len(shape.turns):
            return
        shown = _each([setting.tokenizer.encode(texts[turn]) for texts in setting.appended], shape.group)
        contexts = [a + b + c for a, b, c in zip(_each(contexts, copies), written, shown, strict=True)]
        copies = 1


def _each(contexts: Sequence[list[int]], copies: int) -> list[list[int]]:
    return [context for context in contexts for _ in range(copies)]


@dataclass(frozen=True, slots=True)
class Written:
    """A sequence of ids, and the log-probs recorded when the tokens at `positions` were sampled."""

    ids: list[int]
    positions: list[int]
    logprobs: list[float]


@dataclass(slots=True)
class Work:
    """The work of a round, as far as the side reports it: tokens prefilled, forwards, the host's share of the time."""

    prefilled: int | None = None
    forwards: int | None = None
    host_share: float | None = None
    drafted: int = 0
    accepted: int = 0
    written: list[Written] = field(default_factory=list)


def make_ours(setting: RolloutSetting) -> "RolloutSide | GeneratorSide":
    """Make the Generator's side for a shape of one turn, else the rollout's."""
    return GeneratorSide(setting) if len(setting.shape.turns) == 1 else RolloutSide(setting)


class GeneratorSide:
    """The public Generator: contexts in, samples out."""

    name = "generator"

    def __init__(self, setting: RolloutSetting) -> None:
        self.setting, self.rounds = setting, 0
        self.generator = Generator(setting.policy, setting.tokenizer, max_running=setting.shape.samples)

    def run(self) -> Work:
        self.rounds += 1
        work = Work(prefilled=0)

        def ask(contexts: list[list[int]], copies: int, tokens: int) -> list[list[int]]:
            first = self.rounds * 1_000_000 + len(work.written)
            requests = [
                GenerateRequest(prompt_ids=ids, max_new_tokens=tokens, n=copies, seed=first + number)
                for number, ids in enumerate(contexts)
            ]
            answers = self.generator.generate(requests)
            for context, results in zip(contexts, answers, strict=True):
                for result in results:
                    positions = list(range(len(context), len(context) + len(result.token_ids)))
                    work.written.append(Written([*context, *result.token_ids], positions, list(result.logprobs)))
                    work.prefilled = (work.prefilled or 0) + result.prefill_tokens_computed
                    work.drafted += result.drafted
                    work.accepted += result.accepted
            return [list(result.token_ids) for results in answers for result in results]

        play(self.setting, ask)
        clock = self.generator.clock
        work.forwards, work.host_share = clock.forwards, clock.rest / clock.total
        return work


class RolloutSide:
    """The engine's rollout around an episode whose turns have the lengths of the shape. limits: additional limits."""

    name = "rollout"

    def __init__(self, setting: RolloutSetting, **limits: Any) -> None:
        self.setting, self.rounds = setting, 0
        shape = setting.shape
        system = System("bench", (STOP,), self._episode, _no_reward, TEMPLATE)
        self.given = {
            f"q{number}": [Passage(f"p{number}", "", text)] if text else []
            for number, text in enumerate(setting.passages)
        }
        self.questions = [Question(f"q{number}", text, ()) for number, text in enumerate(setting.questions)]
        self.rollout = Rollout(
            setting.policy,
            setting.tokenizer,
            Shelf(setting.appended),
            system,
            EpisodeConfig(TEMPLATE, len(shape.turns)),
            Renderer(
                tokenizer=setting.tokenizer,
                tags=system.tags,
                k=1,
                chat=False,
                max_passage_tokens=max(shape.passages, shape.appended, 1),
                passage_format="{text}",
            ),
            Limits(
                max_turn_tokens=max(shape.turns) + 1,
                max_policy_tokens=sum(shape.turns) + 1,
                max_context=shape.longest + 1,
                max_num_seqs=shape.samples,
                attention=resolve_attention(
                    "auto", setting.policy.device, setting.policy.dtype, setting.policy.config.head_dim, "rollout"
                ),
                **limits,
            ),
        )

    def sample(self) -> list[Trajectory]:
        """Return a round's trajectories, each with the lengths of the shape; every round has other seeds."""
        shape = self.setting.shape
        self.rounds += 1
        jobs = [
            Job(question, group, sample, (self.rounds * shape.questions + group) * shape.group + sample)
            for group, question in enumerate(self.questions)
            for sample in range(shape.group)
        ]
        trajectories = self.rollout.run(jobs, 1.0)
        for trajectory in trajectories:
            self._check(trajectory)
        return trajectories

    def run(self) -> Work:
        trajectories = self.sample()
        clock = self.rollout.clock
        everything = [one for trajectory in trajectories for one in (trajectory, *trajectory.branches.values())]
        return Work(
            prefilled=clock.prefilled_tokens,
            forwards=clock.forwards,
            host_share=clock.rest / clock.total,
            written=[Written(one.ids(), one.policy_positions(), one.policy_logprobs()) for one in everything],
        )

    def _episode(self, question: Question, config: EpisodeConfig) -> Episode:
        shape = self.setting.shape
        prompt = Prompt(config.template, question.question, self.given[question.id])
        yield prompt
        lengths: list[int] = []  # of the turns, in bytes
        for turn, tokens in enumerate(shape.turns):
            if turn and shape.appended:
                hits = yield Search(f"{question.id[1:]} {turn - 1}")
                yield Retrieved(hits, "", "")
            if turn and turn + 1 == len(shape.turns) and shape.branches:
                yield SpawnBranches(_hidden(prompt, config.template, lengths, tokens))
            written = yield Generate((STOP,), tokens)
            lengths.append(len(written.text))
        return "ended"

    def _check(self, trajectory: Trajectory) -> None:
        """Raise RuntimeError unless all lengths are those of the shape, because the sides would not be comparable."""
        shape = self.setting.shape
        found = [_lengths(trajectory.segments), *(_lengths(b.segments) for b in trajectory.branches.values())]
        wanted = [(shape.longest - sum(shape.turns), shape.turns)]
        if shape.branches:
            wanted += [(context, shape.turns[-1:]) for context in shape.contexts[2:]]
        if found != wanted:
            raise RuntimeError(f"a sample's lengths are {found}, not {wanted} ({trajectory.reason})")


def _lengths(segments: Sequence[Segment]) -> tuple[int, tuple[int, ...]]:
    """Return the number of given tokens, and the number of tokens of each turn."""
    turns = tuple(len(segment.ids) for segment in segments if segment.source is Source.POLICY)
    return sum(len(segment.ids) for segment in segments) - sum(turns), turns


def _hidden(prompt: Prompt, template: str, lengths: Sequence[int], tokens: int) -> dict[str, BranchPrompt]:
    """Return EviOmni's contexts (q, P, r) and (q, e); lengths: bytes of reason and evidence."""
    reason, evidence = lengths
    bare = Prompt(template, prompt.question)
    return {
        "rationale": BranchPrompt(prompt, (KeptSpan(0, reason),), (STOP,), tokens),
        "evidence": BranchPrompt(bare, (KeptSpan(reason, reason + evidence),), (STOP,), tokens),
    }


class Shelf(Retriever):
    """A retriever that answers the query "QUESTION TURN" with that passage."""

    def __init__(self, texts: Sequence[Sequence[str]]) -> None:
        super().__init__()
        self.texts = texts

    def check_k(self, k: int) -> None:
        pass

    def _find(self, queries: list[str], k: int) -> list[list[Found]]:
        places = [tuple(map(int, query.split())) for query in queries]
        return [[Found(-1, Passage(f"{q}-{turn}", "", self.texts[q][turn]), 1.0)] for q, turn in places]


def _no_reward(attempt: object) -> RewardResult:
    raise RuntimeError("the bench rewards nothing")


class HuggingFace:
    """The setting's model as transformers loads it, with a count of the tokens that go through it."""

    def __init__(self, setting: RolloutSetting) -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig
        from transformers.utils import logging as their_logging

        their_logging.set_verbosity_error()
        their_logging.disable_progress_bar()
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
        with tempfile.TemporaryDirectory() as folder:
            setting.policy.save(folder)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.device = setting.policy.device
        self.model: Any = model.to(self.device)
        self.model.generation_config = GenerationConfig(pad_token_id=PAD)
        self.forwards = self.fed = 0
        self.model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: object, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = named["input_ids"] if "input_ids" in named else arguments[0]
        self.forwards += 1
        self.fed += ids.numel()

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Return logits [T, V] for the ids of one sequence."""
        logits_TV: torch.Tensor = self.model(input_ids=torch.tensor([list(ids)], device=self.device)).logits[0]
        return logits_TV

    def generate(self, contexts: list[list[int]], copies: int, tokens: int) -> list[list[int]]:
        """Call `model.generate` once."""
        longest = max(map(len, contexts))
        ids_BT = torch.tensor([[PAD] * (longest - len(ids)) + ids for ids in contexts], device=self.device)
        mask_BT = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in contexts], device=self.device)
        made_BT = self.model.generate(
            ids_BT.repeat_interleave(copies, 0),
            attention_mask=mask_BT.repeat_interleave(copies, 0),
            generation_config=_sampling(tokens, min_new_tokens=tokens),
        )
        written: list[list[int]] = made_BT[:, longest:].tolist()
        return written

    def generate_batch(self, contexts: list[list[int]], copies: int, tokens: int) -> list[list[int]]:
        """Call `model.generate_batch` once. Raises RuntimeError if it lost a request, which it only logs."""
        from transformers.generation.configuration_utils import ContinuousBatchingConfig  # older versions have none

        own = -(-tokens // PAGE) + 2 if copies > 1 else 0
        blocks = sum(-(-(len(ids) + (tokens if copies == 1 else 0)) // PAGE) + 1 + copies * own for ids in contexts)
        options: dict[str, Any] = {
            "num_blocks": int(SPARE * blocks),
            "max_batch_tokens": BATCH_TOKENS,
            "auto_switch_to_flash": False,
        }
        known = signature(ContinuousBatchingConfig).parameters
        options["page_size" if "page_size" in known else "block_size"] = PAGE  # the second before transformers 5.18
        made = self.model.generate_batch(
            inputs=contexts,
            generation_config=_sampling(tokens, num_return_sequences=copies),
            continuous_batching_config=ContinuousBatchingConfig(
                **{name: value for name, value in options.items() if name in known}
            ),
            progress_bar=False,
        )
        wrong = [output.error for output in made.values() if output.error is not None]
        if wrong or len(made) != len(contexts) * copies:
            raise RuntimeError(f"generate_batch answered {len(made)} of {len(contexts) * copies}: {wrong[:1]}")
        return [list(output.generated_tokens) for output in made.values()]


def _sampling(tokens: int, **more: int) -> Any:
    from transformers import GenerationConfig

    options: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": PAD}
    return GenerationConfig(max_new_tokens=tokens, **options, **more)


class HuggingFaceSide:
    """One of the two calls, with a number of samples per call, which has a large effect on a CPU."""

    def __init__(self, setting: RolloutSetting, model: HuggingFace, name: str) -> None:
        self.setting, self.model, self.name = setting, model, name
        self.samples_a_call = setting.shape.samples
        self.one_call = {"generate": model.generate, "generate_batch": model.generate_batch}[name]

    def run(self) -> Work:
        self.model.forwards = self.model.fed = 0
        back = 0  # sampled tokens that were fed again, one at a time

        def ask(contexts: list[list[int]], copies: int, tokens: int) -> list[list[int]]:
            nonlocal back
            back += len(contexts) * copies * (tokens - 1)
            size = max(1, self.samples_a_call // copies)
            parts = [contexts[first : first + size] for first in range(0, len(contexts), size)]
            return [ids for part in parts for ids in self.one_call(part, copies, tokens)]

        play(self.setting, ask)
        return Work(prefilled=self.model.fed - back, forwards=self.model.forwards)

    def settle(self, until: float) -> None:
        """Find the number of samples per call, and warm up. It is doubled as long as that takes less CPU time, and
        until `until` (time.monotonic)."""
        best, least = self.setting.shape.group, float("inf")
        self.samples_a_call = best
        while self.samples_a_call <= self.setting.shape.samples:
            started = time.monotonic()
            seconds = self._cpu_seconds()
            if seconds >= least:
                break
            best, least = self.samples_a_call, seconds
            if 2 * time.monotonic() - started > until:
                break
            self.samples_a_call *= 2
        self.samples_a_call = best

    def _cpu_seconds(self) -> float:
        started = time.process_time()
        self.run()
        return time.process_time() - started
