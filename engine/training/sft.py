"""Supervised fine-tuning on segmented transcripts: the loss is -log p of every POLICY token, and of no other.

A transcript is a line of JSON: {"id", "question", "segments": [{"source": "policy" | "retrieved" | "feedback" |
"prompt", "text"}, ..]}. Each segment is encoded by itself, so that a rollout which appends the same pieces sees the
same tokens. A segment with "ids", as in a trajectory, is trained on these ids. A transcript without a prompt segment
gets the recipe's own prompt for its question, or that of its own "template", with the "passages" [{"title", "text"},
..] that the template has a place for. After a policy segment with "end": true the model's end of text is appended.
sft_data.py makes transcripts from questions with answers.

A policy segment may list `copied`: character ranges of names that are in the question or in a passage. The gate is the
share of their tokens that is predicted right on held-out transcripts. Copying a name is learned suddenly, late with
some seeds, and reinforcement learning cannot teach a policy that never does it.
"""

import itertools
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F

from thresher.common import console
from thresher.common.errors import UserError
from thresher.common.jsonl import as_object
from thresher.common.records import ON_PURPOSE, read_records
from thresher.engine.config.sections import OptimSection, SftSection
from thresher.engine.episode import Prompt, read_template
from thresher.engine.optim.master_weights import TrainedWeights, make_optimizer, scheduled_lr, step_optimizer
from thresher.engine.packing import TrainSequence, pack
from thresher.engine.protocol.prompts import Renderer, fit
from thresher.engine.scoring.transcripts import read_pieces
from thresher.engine.training.sft_data import Unused, make_records, refuse_nothing
from thresher.engine.training.update import backward_from_loss, choose_attention
from thresher.kernels import grpo_loss
from thresher.kernels.operands import NotFinite
from thresher.policy.tokenizer import Tokenizer
from thresher.retrieval.passages import to_passage
from thresher.retrieval.questions import read_questions
from thresher.rewards.reward import Source

FORM = "{'question', 'segments': [{'source', 'text'}, ..]}"


@dataclass(frozen=True, slots=True)
class Transcript:
    """Token ids, the positions that are trained, and those among them that were copied from the question or a
    passage. cut: whether passages of its prompt were cut."""

    ids: list[int]
    positions: list[int]
    copied: list[int]
    cut: bool = False


def read_transcripts(
    path: str | Path, tokenizer: Tokenizer, renderer: Renderer, template: str, end_id: int | None = None
) -> list[Transcript]:
    """Read all transcripts of a JSONL file. UserError names the line of a malformed one."""
    placed = ((f"{path}:{number}", record) for number, record in read_records(path, foreign=True, remedy=ON_PURPOSE))
    result = encode_all(placed, tokenizer, renderer, template, end_id)
    if not result:
        raise UserError(f"{path}: has no transcripts; expected one JSON object a line")
    return result


def read_data(
    sft: SftSection, tokenizer: Tokenizer, renderer: Renderer, system_template: str, end_id: int | None
) -> tuple[list[Transcript], list[Unused], int]:
    """Return the transcripts of sft.data, the questions that give none, and the number of all questions. UserError for
    a file that cannot be read or gives no transcript."""
    assert sft.data is not None
    template = None if sft.template is None else read_template(sft.template, passages=sft.format != "closed-book")
    if sft.format == "reasoning" and "{passages}" not in system_template:
        raise UserError('sft.format is "reasoning", but the prompt of the system shows no passages; use system arena')
    questions = read_questions(sft.data)
    records, unused = make_records(questions, sft.format, sft.answer, template)
    refuse_nothing(records, unused, sft.data, sft.format)
    placed = ((f"{sft.data}: question {record['id']}", record) for record in records)
    return encode_all(placed, tokenizer, renderer, system_template, end_id), unused, len(questions)


def encode_all(
    placed: Iterable[tuple[str, dict[str, Any]]],
    tokenizer: Tokenizer,
    renderer: Renderer,
    template: str,
    end_id: int | None,
) -> list[Transcript]:
    """Return the transcripts of (place, record) pairs. UserError names the place of a malformed one."""
    result = []
    with console.counting("transcripts into tokens:") as counter:
        for place, record in placed:
            segments = record.get("segments")
            if not isinstance(segments, list) or not segments:
                raise UserError(f"{place}: expected {FORM}, but it has no segments; correct or remove it")
            read_pieces(segments, place)
            try:
                for part in _contexts(record):
                    result.append(encode_transcript(part, tokenizer, renderer, template, end_id))
            except (LookupError, TypeError, ValueError) as error:
                why = f"it has no {error}" if isinstance(error, KeyError) else error
                raise UserError(f"{place}: expected {FORM}, but {why}; correct or remove it") from error
            counter(len(result))
    if cut := sum(transcript.cut for transcript in result):
        console.console.print(
            f"sft: {cut:,} of {len(result):,} prompts had passages cut to {renderer.max_passage_tokens:,} tokens; "
            "raise rollout.max_passage_tokens",
            soft_wrap=True,
        )
    return result


def _contexts(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one record for each context in which the policy wrote; a folded trajectory has several."""
    segments = record["segments"]
    prompts = [segment["source"] == Source.PROMPT for segment in segments]
    # In a stored trajectory each prompt segment begins a context; in your own record several may form one prompt.
    stored = all("ids" in segment for segment in segments)
    starts = [n for n, (before, here) in enumerate(itertools.pairwise(prompts), 1) if here and (stored or not before)]
    parts = [segments[start:end] for start, end in itertools.pairwise([0, *starts, len(segments)])]
    written = [part for part in parts if any(segment["source"] == Source.POLICY for segment in part)]
    return [{**record, "segments": part} for part in written] or [record]


def encode_transcript(
    record: dict[str, Any], tokenizer: Tokenizer, renderer: Renderer, template: str, end_id: int | None = None
) -> Transcript:
    """Return a transcript's tokens; `end_id` is the end of text. LookupError, TypeError or ValueError for a record that
    is malformed or trains nothing."""
    segments = record["segments"]
    cut = False
    ids: list[int] = []
    rows: list[int] = []
    copied: list[int] = []
    if segments[0]["source"] != Source.PROMPT:
        prompt = _prompt(record, record.get("template", template))
        passages = fit(prompt.passages, renderer, str(record.get("id", "")))
        cut = passages != tuple(prompt.passages)
        ids = renderer.prompt(replace(prompt, passages=passages))
    for segment in segments:
        source = Source(segment["source"])
        new = _segment_ids(segment, source, tokenizer)
        if not ids and source is Source.PROMPT:
            ids = renderer.begin(new)
        start = len(ids)
        ids.extend(new)
        if source is Source.POLICY:
            rows.extend(range(start, len(ids)))
            copied.extend(start + at for at in _inside(segment, new, tokenizer))
            if segment.get("end", False):
                if end_id is None:
                    raise ValueError("a segment has an end, but the model has no end-of-text token")
                rows.append(len(ids))
                ids.append(end_id)
    if not rows or rows[0] == 0:
        raise ValueError("no policy segment has text" if not rows else "nothing precedes the first policy segment")
    return Transcript(ids, rows, copied, cut)


def _prompt(record: dict[str, Any], template: str) -> Prompt:
    passages = record["passages"] if "{passages}" in template else []
    places = ((value, f"passage {number}") for number, value in enumerate(passages, 1))
    passages = [to_passage(as_object(value, place), 0, place) for value, place in places]
    return Prompt(template, record["question"], passages)


def _segment_ids(segment: dict[str, Any], source: Source, tokenizer: Tokenizer) -> list[int]:
    text = segment["text"]
    if "ids" not in segment:
        return tokenizer.encode_template(text) if source is Source.PROMPT else tokenizer.encode(text)
    ids = list(segment["ids"])
    if tokenizer.decode(ids) != text:
        raise ValueError(f'the "ids" of {text!r} come from another tokenizer; leave them out to train on the text')
    return ids


def _inside(segment: dict[str, Any], ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """Return the places of a segment's tokens whose bytes lie within its `copied` ranges (characters)."""
    ranges = [
        (len(segment["text"][:start].encode()), len(segment["text"][:end].encode()))
        for start, end in segment.get("copied", ())
    ]
    found, at = [], 0
    for position, token in enumerate(ids):
        end = at + len(tokenizer.token_bytes(token))
        if any(low <= at and end <= high for low, high in ranges):
            found.append(position)
        at = end
    return found


@dataclass(frozen=True, slots=True)
class SftResult:
    steps: int
    restarts: int
    loss: float
    copying: float | None  # share of held-out copied tokens predicted right, at the end
    passed: bool


@dataclass(frozen=True, slots=True)
class Begun:
    """An earlier training that is to be continued. records: those of its steps so far, at least one. restore: restores
    the weights after the last of them in the policy, and the moments in the optimiser."""

    records: Sequence[Mapping[str, Any]]
    restore: Callable[[torch.optim.Optimizer], None]


class SftTrainer:
    """Train weights in place on transcripts, until the gate opens or no steps are left."""

    def __init__(
        self,
        weights: TrainedWeights,
        transcripts: Sequence[Transcript],
        sft: SftSection,
        optim: OptimSection,
        vocab_size: int,
        seed: int,
    ) -> None:
        self.weights, self.policy = weights, weights.policy
        self.sft, self.optim, self.vocab_size, self.seed = sft, optim, vocab_size, seed
        self.attention, _ = choose_attention(optim, self.policy)
        gated = sft.stop_at_copy_accuracy is not None
        share = sft.held_out if sft.held_out is not None else 0.05 if gated else 0.0
        held_out = max(1, round(len(transcripts) * share)) if share else 0
        self.held_out, self.training = list(transcripts[:held_out]), list(transcripts[held_out:])
        if not self.training:
            raise UserError("sft: every transcript is held out; lower sft.held_out or give more transcripts")
        if gated and not any(one.copied for one in self.held_out):
            raise UserError(
                "sft.stop_at_copy_accuracy: expected held-out transcripts with copied names, found none; leave it out, "
                "or raise sft.held_out"
            )
        longest, positions = max(len(one.ids) for one in transcripts), self.policy.config.max_position_embeddings
        if longest > positions:
            raise UserError(
                f"sft: a transcript has {longest:,} tokens, but the model was made for {positions:,} positions; leave "
                "out those that are longer"
            )

    @property
    def data_digest(self) -> str:
        """Return the SHA-256, in hex, of the tokens of all transcripts, in their order."""
        digest = sha256()
        for transcript in (*self.held_out, *self.training):
            for numbers in (transcript.ids, transcript.positions, transcript.copied):
                digest.update(array("q", [len(numbers), *numbers]).tobytes())
        return digest.hexdigest()

    def run(
        self,
        log: Callable[[dict[str, Any]], None],
        begun: Begun | None = None,
        keep: Callable[[int, torch.optim.Optimizer], None] = lambda done, optimizer: None,
    ) -> SftResult:
        """Train from the current weights.

        log: called with the record of each step: step, restart, loss, lr, grad_norm, tokens, and copying where it was
        measured. begun: continue after its records; the weights are those with which it began. keep: called after each
        step with the number of steps of all attempts so far, and the optimiser.
        """
        trained = {name: value for name, value in self.weights.module.named_parameters() if value.requires_grad}
        start = {name: value.detach().clone() for name, value in trained.items()}
        first = begun.records[-1]["restart"] if begun else 0
        for restart in range(first, self.sft.max_restarts + 1):
            if restart > first:
                self.weights.module.load_state_dict(start, strict=False)
                self.weights.refresh()
            result = self._attempt(restart, log, begun if restart == first else None, keep)
            if result.passed:
                break
        return result

    def _attempt(
        self,
        restart: int,
        log: Callable[[dict[str, Any]], None],
        begun: Begun | None,
        keep: Callable[[int, torch.optim.Optimizer], None],
    ) -> SftResult:
        sft = self.sft
        optimizer = make_optimizer(self.weights.module, self.optim, sft.lr)
        copying, loss, done = None, float("nan"), 0
        if begun is not None:
            begun.restore(optimizer)
            for record in begun.records:
                if record["restart"] == restart:
                    done, loss, copying = record["step"], record["loss"], record.get("copying", copying)
        for step, batch in itertools.islice(enumerate(self._batches(restart)), done, sft.steps):
            if self._opens(copying):
                break
            lr = scheduled_lr(sft.lr, sft.schedule, sft.warmup_ratio, step, sft.steps)
            try:
                loss, tokens = self._backward(batch)
            except NotFinite:
                loss = math.nan
            self.weights.complete()
            norm = self.weights.clip(self.optim.max_grad_norm)
            step_optimizer(optimizer, lr)
            self.weights.refresh()
            if not (math.isfinite(loss) and math.isfinite(norm)):
                what = "gradient" if math.isfinite(loss) else "policy"
                raise UserError(f"sft: step {step + 1}: the {what} is not finite; start again with a lower sft.lr")
            done = step + 1
            record = {"step": done, "restart": restart, "loss": loss, "lr": lr, "grad_norm": norm, "tokens": tokens}
            due = done % sft.gate_every == 0 and done >= sft.min_steps
            if sft.stop_at_copy_accuracy is not None and (due or done == sft.steps):
                with console.stage("names held out"):
                    copying = self.copying()
                record["copying"] = copying
            log(record)
            keep(restart * sft.steps + done, optimizer)
        return SftResult(done, restart, loss, copying, sft.stop_at_copy_accuracy is None or self._opens(copying))

    def _opens(self, copying: float | None) -> bool:
        """Return whether there is a gate and a policy with this copying accuracy passes it."""
        gate = self.sft.stop_at_copy_accuracy
        return gate is not None and copying is not None and copying >= gate

    def _batches(self, restart: int) -> Iterator[list[Transcript]]:
        """Yield the batches of an attempt without end. They are a function of the seed and the restart."""
        rng = Random(f"sft {self.seed} {restart}")
        order: list[Transcript] = []
        while True:
            while len(order) < self.sft.batch_size:
                order.extend(rng.sample(self.training, len(self.training)))
            yield order[: self.sft.batch_size]
            order = order[self.sft.batch_size :]

    def _backward(self, batch: Sequence[Transcript]) -> tuple[float, int]:
        rows = sum(len(transcript.positions) for transcript in batch)
        sequences = [_sequence(t.ids, t.positions, 1.0, 1.0 / rows) for t in batch]
        loss, tokens, checkpoint = 0.0, 0, self.optim.checkpoint_activations == "on"
        micro_batches = pack(sequences, self.optim.micro_batch_tokens, self.policy.device, self.attention)
        with console.stage("update", len(micro_batches)) as line:
            for number, packed in enumerate(micro_batches, 1):
                hidden_TH = self.policy.hidden(packed.ids_T, packed.layout.positions_T, packed.layout, checkpoint)
                hidden_RH = packed.pick(hidden_TH)
                # Without old log-probs and at advantage 1, the gradient of the policy is that of -log p.
                result = grpo_loss(
                    hidden_RH,
                    self.policy.head_VH,
                    packed.targets_R,
                    None,
                    packed.advantages_R,
                    packed.weights_R,
                    vocab_size=self.vocab_size,
                    workspace_bytes=self.optim.loss_workspace_bytes,
                    lm_head_grad_VH=self.weights.head_gradient(),
                )
                backward_from_loss(self.weights, hidden_RH, result)
                loss -= float((packed.weights_R * result.logprobs).sum())
                tokens += packed.tokens
                line.at(number, str)
        return loss, tokens

    @torch.no_grad()
    def copying(self) -> float:
        """Return the share of the held-out copied tokens that are the most likely token at their position."""
        sequences = [_sequence(t.ids, t.copied, 0.0, 1.0) for t in self.held_out]
        right = total = 0
        for packed in pack(sequences, self.optim.micro_batch_tokens, self.policy.device, self.attention):
            hidden_TH = self.policy.hidden(packed.ids_T, packed.layout.positions_T, packed.layout)
            head_VH = self.policy.head_VH[: self.vocab_size]
            for rows_R, targets_R in zip(packed.rows_R.split(256), packed.targets_R.split(256), strict=True):
                best_R = F.linear(hidden_TH.index_select(0, rows_R), head_VH).argmax(-1)
                right += int((best_R == targets_R).sum())
            total += len(packed.rows_R)
        return right / max(total, 1)


def _sequence(ids: list[int], positions: list[int], advantage: float, weight: float) -> TrainSequence:
    old_logprobs = [0.0] * len(positions)
    return TrainSequence(ids=ids, positions=positions, old_logprobs=old_logprobs, advantage=advantage, weight=weight)
