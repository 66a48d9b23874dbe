"""`thresher study leak`: what an attention mask lets through of the text that EviOmni masks on its input.

EviOmni rewards o_r, written with e masked, and o_e, written with P and r masked. Its mask is hard: the text is absent,
and the context is prefilled from scratch. A soft mask is on the attention: the answer does not attend to the text, but
the tokens between them did when their keys and values were computed. The study measures the log-prob of the first gold
answer after `<answer>` and a space, in nats at temperature 1. One greedy trajectory per question gives r and e, and
five contexts for each of the two answers:

    present   q, P, r, e: nothing is masked, as for o_f
    soft      the same tokens; those from `<answer>` on do not attend to the masked ones
    placed    the tokens of `hard`, at the positions that they have in `soft`
    hard      the branch of engine/systems/eviomni.py: the masked text is absent, and positions have no gap
    empty     as `hard`, with nothing between the tags of r (for o_r) or of e (for o_e)

`soft` and `placed` differ only in the keys and values of the tokens that saw the masked text: soft - placed is the
leak. placed - hard is the effect of the positions. For o_r the leak is 0 by construction, because e is the last text
before `<answer>`, and no token that the answer sees has seen it.

Axes: T tokens, N query heads, K key/value heads, D head dimension.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from thresher.bench.studies.runs import ModelRecipe, Task, load_task, write_json
from thresher.common import console
from thresher.common.errors import UserError
from thresher.common.files import staged_folder
from thresher.common.jsonl import write_jsonl
from thresher.common.machine import origin
from thresher.engine.config.sections import SystemSection
from thresher.engine.episode import BranchPrompt, KeptSpan, Prompt
from thresher.engine.evaluation.evaluate import jobs_of
from thresher.engine.packing import common_length
from thresher.engine.protocol.prompts import Renderer
from thresher.engine.protocol.trajectory import Trajectory, turns
from thresher.engine.rollout.contexts import context_ids, kept_ids
from thresher.engine.systems.eviomni import Options, branches
from thresher.kernels import token_logprobs
from thresher.kernels.attention.varlen import TrainingAttention, Varlen
from thresher.policy.model import Policy
from thresher.retrieval.questions import Question
from thresher.rewards.papers.eviomni import evidence_of
from thresher.rewards.statistics import intervals
from thresher.rewards.text import contains_answer

CONTEXTS = ("present", "soft", "placed", "hard", "empty")
KEEPS = {"rationale": "reason", "evidence": "extract"}  # the tag of the text that a branch keeps
ANSWERS = {"rationale": "o_r (e masked)", "evidence": "o_e (P and r masked)"}
UNFOUND = "o_e, no gold in e"  # the rows of o_e whose evidence does not contain a gold answer

Row = dict[str, Any]


def run_study(out: Path, chosen: ModelRecipe) -> None:
    """Write leak.json and rows.jsonl into the folder `out`, which must not exist yet."""
    if out.exists():
        raise UserError(f"{out}: exists already; choose another folder with --out")
    recipe = chosen.read("model.dtype=float32")
    if (name := recipe.need(SystemSection).name) not in ("eviomni", "lear"):
        raise UserError(f"{chosen.path}: its system is {name}, expected eviomni or lear; name such a recipe")
    task = load_task(recipe)
    if task.context.policy.config.delta is not None:
        raise UserError(
            f"{recipe.model.path}: has layers with a state, expected attention in every layer, because an attention "
            "mask does not hide text from a state; use another model"
        )
    if not task.held_out:
        raise UserError(f"{chosen.path}: names no questions to measure on; set data.dev to a file of questions")
    console.announce(f"study leak: {len(task.held_out)} questions of {chosen.path}, with {recipe.model.path}")
    with task.context.threads(), torch.no_grad():
        questions = task.rollout.retrieve_and_truncate(task.held_out).questions
        trajectories = task.rollout.run(jobs_of(questions), 0.0)
        rows = [
            row
            for question, trajectory in zip(questions, trajectories, strict=True)
            for row in measure(question, trajectory, task)
        ]
    if not rows:
        raise UserError(
            f"{recipe.model.path}: no trajectory has both a rationale and evidence, so there is nothing to mask; use a "
            "model that EviOmni has trained"
        )
    figures = summary_of(rows)
    head = {"recipe": chosen.path, "model": recipe.model.path, "questions": len(questions)}
    with staged_folder(out) as staged:
        write_jsonl(staged / "rows.jsonl", rows)
        write_json(staged / "leak.json", head | origin(recipe.model.device == "cuda") | {"figures": figures})
    show(figures, len(questions))


def measure(question: Question, trajectory: Trajectory, task: Task) -> list[Row]:
    """Return a row for each branch of a trajectory; none if r or e is missing. Log-probs are sums over the tokens of
    the gold."""
    renderer, tokenizer = task.rollout.renderer, task.context.tokenizer
    prompt = Prompt(task.rollout.episode_config.template, question.question, question.passages)
    written = [token for turn in islice(turns(trajectory), 1) for token in turn.ids]
    found = branches(prompt, tokenizer.decode_bytes(written), Options())
    if len(found) < len(ANSWERS):
        return []
    gold = tokenizer.encode(f" {question.golds[0]}")  # with a space, as IGPO scores it
    tail = tokenizer.encode_template("<answer>") + gold
    read = partial(logprob, task.context.policy, task.context.vocab_size, tail, len(gold))
    evidence = evidence_of(trajectory.pieces(tokenizer))
    head = {"id": question.id, "gold": question.golds[0], "recalled": contains_answer(evidence, question.golds)}
    rows = []
    for name, branch in found.items():
        context, masked = full_context(prompt, branch, written, span_of(found["evidence"]).end, renderer)
        seen = sorted(set(range(len(context))) - set(masked))
        hard = [context[place] for place in seen]
        nothing = replace(branch, parts=(f"<{KEEPS[name]}></{KEEPS[name]}>",))
        values = {
            "present": read(context),
            "soft": read(context, masked),
            "placed": read(hard, positions=[*seen, *range(len(context), len(context) + len(tail))]),
            "hard": read(hard),
            "empty": read(context_ids(nothing, [], renderer)),
        }
        rows.append(head | {"answer": name, "tokens": len(gold), "masked": len(masked), **values})
    return rows


def full_context(
    prompt: Prompt, branch: BranchPrompt, written: Sequence[int], end: int, renderer: Renderer
) -> tuple[list[int], list[int]]:
    """Return the ids of the prompt and of the text written up to byte `end`, and the positions of the ids that the
    branch masks. The others are the branch's, without its `<answer>`."""
    kept = span_of(branch)
    whole, bare = renderer.prompt(prompt), renderer.prompt(branch.prompt)
    start = common_length(np.array(whole), np.array(bare))
    spans = pairwise((0, kept.start, kept.end, end))
    before, inside, after = (kept_ids(KeptSpan(*span), written, renderer.tokenizer) for span in spans)
    context = whole + before + inside + after
    masked = [*range(start, start + len(whole) - len(bare)), *range(len(whole), len(whole + before))]
    return context, [*masked, *range(len(context) - len(after), len(context))]


def span_of(branch: BranchPrompt) -> KeptSpan:
    """Return the span of the policy's text that a branch of EviOmni keeps."""
    (span,) = (part for part in branch.parts if isinstance(part, KeptSpan))
    return span


def logprob(
    policy: Policy,
    vocab_size: int,
    tail: Sequence[int],
    scored: int,
    context: Sequence[int],
    masked: Sequence[int] = (),
    positions: Sequence[int] | None = None,
) -> float:
    """Return the log-prob of the last `scored` ids of `tail` after `context`, in nats. masked: places in the context to
    which no token of `tail` attends. positions: those of context and tail; None: 0, 1, .."""
    ids_T = torch.tensor([*context, *tail], device=policy.device)
    layout = Varlen([len(ids_T)], policy.device, soft_mask(masked, len(context)))
    positions_T = layout.positions_T if positions is None else torch.tensor(positions, device=policy.device)
    hidden_TH = policy.hidden(ids_T, positions_T, layout)[-1 - scored : -1]
    values_T, _ = token_logprobs(hidden_TH, policy.head_VH, ids_T[-scored:], vocab_size=vocab_size)
    return float(values_T.double().sum())


def soft_mask(masked: Sequence[int], first: int) -> TrainingAttention:
    """Return causal attention of one sequence in which no token from number `first` on attends to the tokens
    `masked`."""

    def attend(q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, layout: Varlen) -> Tensor:
        seen_TT = torch.ones(len(q_TND), len(q_TND), dtype=torch.bool, device=q_TND.device).tril()
        seen_TT[first:, list(masked)] = False
        q, k, v = (x.transpose(0, 1)[None] for x in (q_TND, k_TKD, v_TKD))
        o_NTD = F.scaled_dot_product_attention(q, k, v, attn_mask=seen_TT, enable_gqa=True)[0]
        return o_NTD.transpose(0, 1)

    return attend


def summary_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Return for each answer the means of the contexts and of the differences between neighbours, with intervals over
    questions: of the sum over the gold's tokens (nats), and per token."""
    groups = {label: [row for row in rows if row["answer"] == name] for name, label in ANSWERS.items()}
    groups[UNFOUND] = [row for row in groups[ANSWERS["evidence"]] if not row["recalled"]]
    found: dict[str, Any] = {}
    for label, group in groups.items():
        columns = {name: [row[name] for row in group] for name in CONTEXTS}
        columns |= {f"{a} - {b}": [row[a] - row[b] for row in group] for a, b in pairwise(CONTEXTS)}
        per_token = {
            name: [value / row["tokens"] for value, row in zip(values, group, strict=True)]
            for name, values in columns.items()
        }
        sums, shares = intervals(columns), intervals(per_token)
        found[label] = {name: {"nats": asdict(sums[name]), "per_token": asdict(shares[name])} for name in sums}
    return found


def show(figures: Mapping[str, Any], questions: int) -> None:
    """Print a line for each answer and context, and for each difference; soft - placed is the leak."""

    def shown(one: Mapping[str, Any]) -> tuple[str, str]:
        known = one["low"] is not None
        return f"{one['mean']:.3f}", f"{one['low']:.3f} to {one['high']:.3f}" if known else "-"

    console.table(
        f"log-prob of the gold, mean over trajectories of {questions} questions; soft - placed is the leak",
        ("answer", "context", "nats", "95% interval", "a token", "95% interval", "trajectories"),
        [
            (label, name, *shown(one["nats"]), *shown(one["per_token"]), one["nats"]["count"])
            for label, group in figures.items()
            for name, one in group.items()
        ],
    )
