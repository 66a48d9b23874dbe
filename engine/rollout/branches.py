"""Branches of a trajectory: contexts put together anew, in which the policy writes once more, for the reward alone; and
those of its calls, which it waits for.

A masked part is absent from a branch's input, and nothing that was computed from it is used: of the trajectory's own
cache a branch may share the blocks up to the first token in which the two differ, and computes all that follows. So a
branch is an ordinary sample with a prompt of its own: the prompt's template, what was kept of the policy's text, and
text of the engine's. All of it is PROMPT there, and only what the policy then writes is POLICY.
"""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from thresher.engine.episode import Episode, Generate, Kept, Reprefill, Retrieved
from thresher.engine.protocol.passages import fit
from thresher.engine.protocol.render import Renderer
from thresher.engine.rollout.samples import Job
from thresher.policy.tokenizer import Tokenizer


def context_ids(branch: Reprefill, written: Sequence[int], renderer: Renderer) -> list[int]:
    """The ids of a branch's context; `written` are all tokens that the policy sampled before the fork."""
    ids = renderer.prompt(branch.prompt)
    for part in branch.parts:
        if isinstance(part, Kept):
            ids += kept_ids(part, written, renderer.tokenizer)
        elif isinstance(part, Retrieved):
            ids += renderer.retrieved(part)
        else:
            ids += renderer.tokenizer.encode_template(part)
    return ids


def with_fitted_passages(context: Reprefill, renderer: Renderer, question_id: str) -> tuple[Reprefill, int]:
    """A call's context, the passages of its prompt cut to the budget of a search; and how many tokens of all its
    passages that budget costs."""
    asked = context.prompt.passages
    passages = fit(asked, renderer, question_id)
    cut = len(renderer.passages(asked)) - len(renderer.passages(passages))
    cut += sum(renderer.retrieved_and_cut(part)[1] for part in context.parts if isinstance(part, Retrieved))
    return replace(context, prompt=replace(context.prompt, passages=passages)), cut


def kept_ids(kept: Kept, written: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Tokens of `written` between two of its bytes: whole where they lie inside, else one token for each byte kept."""
    ids, start = [], 0
    for token in written:
        text = tokenizer.token_bytes(token)
        end = start + len(text)
        if kept.start <= start and end <= kept.end:
            ids.append(token)
        elif inside := text[max(kept.start - start, 0) : max(kept.end - start, 0)]:
            ids += tokenizer.byte_ids(inside)
        start = end
    return ids


def branch_episode(branch: Reprefill, _: Job) -> Episode:
    yield branch.prompt  # rendered already, with what was kept
    turn = yield Generate(branch.stop, branch.max_tokens)
    return "ended" if turn.stop is None else "answered"


def branch_seed(seed: int, name: str) -> int:
    """The noise of a branch is its own: 63 bits that depend on the trajectory's seed and the branch's name."""
    return int.from_bytes(blake2b(f"{seed} {name}".encode(), digest_size=8).digest()) >> 1
