"""Analyses for ARENA's SFT-reasoning, written by the backbone itself. The prompt shows it a question with its
references, the relevant ones among them and the answer, and asks it to derive the answer from these.

The text between the analysis tags is kept. An analysis that does not close within the limit, and a question whose
prompt leaves no room for one, give None. Decoding is greedy, by the engine's own rollout, so every run writes the same.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from thresher.common import console
from thresher.common.errors import UserError
from thresher.engine.assemble import check_fit
from thresher.engine.episode import Episode, EpisodeConfig, Generate, Prompt, Turn
from thresher.engine.evaluation.evaluate import jobs_of
from thresher.engine.protocol.prompts import Renderer
from thresher.engine.protocol.trajectory import Trajectory
from thresher.engine.rollout.rollout import Limits, Rollout
from thresher.engine.systems import load_system
from thresher.policy.model import load_policy
from thresher.policy.tokenizer import Tokenizer, load_tokenizer
from thresher.retrieval.questions import Question
from thresher.rewards.reward import Source

RUNNING = 16  # analyses written at once
TEMPLATE = """Below are numbered references, a question, the references that matter for it, and its answer.

<references>
{passages}
</references>

{question}

Write how the answer follows from those references, step by step; name the reference, such as [2], behind every claim.
Write it between <analysis> and </analysis>, and nothing else.
"""


def with_answer(question: Question) -> Question:
    """Return the question with its gold references and its answer in the text, as data and not as template."""
    indices = ", ".join(f"[{index}]" for index in sorted(question.gold_indices or ()))
    text = f"Question: {question.question}\nReferences that matter: {indices}\nAnswer: {question.golds[0]}"
    return replace(question, question=text)


def explain(question: Question, config: EpisodeConfig) -> Episode:
    yield Prompt(config.template, question.question, question.passages)
    yield Generate(stop=("</analysis>",))
    return "ended"


def write_analyses(
    questions: Sequence[Question], model: str | Path, device: str = "cpu", max_tokens: int = 512
) -> dict[str, str | None]:
    """Return each question's analysis by id, None if there is none. Questions need passages, gold indices and golds.

    The model computes in float32 on a CPU, in bfloat16 on CUDA, and is prompted through its chat template if it has
    one.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device is cuda, but torch sees no CUDA device; use cpu")
    if not questions:
        return {}
    folder = Path(model)
    tokenizer = load_tokenizer(folder)
    policy = load_policy(folder, torch.bfloat16 if device == "cuda" else torch.float32, device).requires_grad_(False)
    check_fit(policy, tokenizer, folder)
    arena = load_system("arena", {})
    room = policy.config.max_position_embeddings
    renderer = Renderer(
        tokenizer=tokenizer,
        tags=arena.tags,
        k=1,
        chat=tokenizer.chat_template is not None,
        max_passage_tokens=sys.maxsize,  # nothing is cut: prompts that exceed the context are left out below
        passage_format=arena.preset["retrieval"]["passage_format"],
    )
    asked = {question.id: with_answer(question) for question in questions}
    lengths = {id_: len(renderer.prompt(Prompt(TEMPLATE, q.question, q.passages))) for id_, q in asked.items()}
    fitting = [question for question in asked.values() if lengths[question.id] + max_tokens <= room]
    found: dict[str, str | None] = dict.fromkeys(asked)
    if not fitting:
        return found
    longest = max(lengths[question.id] for question in fitting) + max_tokens
    limits = Limits(max_turn_tokens=max_tokens, max_policy_tokens=max_tokens, max_context=longest, max_num_seqs=RUNNING)
    rollout = Rollout(
        policy, tokenizer, None, replace(arena, episode=explain), EpisodeConfig(TEMPLATE, 1), renderer, limits
    )
    jobs = jobs_of(fitting)
    with console.progress_line("analyses", len(jobs)) as line, console.polling(rollout.stage):
        done = 0

        def progress(count: int) -> None:
            nonlocal done
            done += count
            line.to(done, "")

        for trajectory in rollout.run(jobs, 0.0, progress):
            found[trajectory.question_id] = analysis_in(trajectory, tokenizer)
    return found


def analysis_in(trajectory: Trajectory, tokenizer: Tokenizer) -> str | None:
    """Return the text before the closing tag, after an opening tag if the model wrote it; None if there is none."""
    (segment,) = (segment for segment in trajectory.segments if segment.source is Source.POLICY)
    if segment.stop is None:
        return None
    text = tokenizer.decode_bytes(segment.ids)
    inside = Turn(text, segment.stop).inside("analysis")
    if inside is None and b"<analysis>" not in text:
        inside = text.partition(b"</analysis>")[0].decode("utf-8", errors="replace").strip() or None
    return inside
