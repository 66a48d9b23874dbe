"""Contexts that an episode builds: of branches, in which the policy writes another turn; of calls, for which the caller
waits; of folds, in which the episode continues.

A masked span is absent from a branch's input, and nothing that was computed from it is used: a branch shares the
trajectory's cached blocks up to the first token in which the two differ. A branch is therefore an ordinary sample. Its
prompt is the prompt's template, the kept spans of the policy's text, and engine text, all with the source PROMPT.
"""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from thresher.common.errors import UserError
from thresher.engine.episode import BranchPrompt, Episode, Generate, KeptSpan, Retrieved
from thresher.engine.protocol.prompts import Renderer, fit
from thresher.policy.tokenizer import Tokenizer


def context_ids(branch: BranchPrompt, written: Sequence[int], renderer: Renderer) -> list[int]:
    """Return the ids of a branch's context. written: all tokens that the policy has sampled so far, in all contexts."""
    ids = renderer.prompt(branch.prompt)
    for part in branch.parts:
        if isinstance(part, KeptSpan):
            ids += kept_ids(part, written, renderer.tokenizer)
        elif isinstance(part, Retrieved):
            ids += renderer.retrieved(part)[0]
        else:
            ids += renderer.tokenizer.encode_template(part)
    return ids


def with_truncated_passages(context: BranchPrompt, renderer: Renderer, question_id: str) -> tuple[BranchPrompt, int]:
    """Return the context of a call or fold with truncated passages, and the number of passage tokens cut. The passages
    of its prompt are truncated to the budget of a search."""
    asked = context.prompt.passages
    passages = fit(asked, renderer, question_id)
    cut = len(renderer.passages(asked)) - len(renderer.passages(passages))
    cut += sum(renderer.retrieved(part)[1] for part in context.parts if isinstance(part, Retrieved))
    return replace(context, prompt=replace(context.prompt, passages=passages)), cut


def kept_ids(kept: KeptSpan, written: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of `written` between two of its bytes. A token inside is kept whole; of others, each kept byte
    becomes one token."""
    if not 0 <= kept.start <= kept.end:
        raise UserError(
            f"a context keeps the bytes {kept.start} to {kept.end} of what the policy wrote; expected 0 <= start <= end"
        )
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


def branch_episode(branch: BranchPrompt) -> Episode:
    yield branch.prompt  # already rendered, with the kept text
    turn = yield Generate(branch.stop, branch.max_tokens)
    return "ended" if turn.stop is None else "answered"


def branch_seed(seed: int, name: str) -> int:
    """Return the seed of a branch, of a call ("call 1") or of the context after a fold ("fold"): 63 bits that depend on
    the sample's seed and the name. Its noise must be its own, because positions begin anew."""
    return int.from_bytes(blake2b(f"{seed} {name}".encode(), digest_size=8).digest()) >> 1
