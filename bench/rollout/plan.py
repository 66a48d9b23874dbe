"""A shape played by whoever has nothing but a function from contexts to new tokens: it submits every context anew.

That is what users of `generate` do, and of our Generator: behind each turn of a search the whole text so far goes in
again, with the passage appended; EviOmni's answers are asked for in three contexts, (q, P, r, e), (q, P, r) and (q, e).

Deliberately absent: any clock.
"""

from collections.abc import Callable, Sequence

from thresher.bench.rollout.setting import RolloutSetting

# contexts, samples of each, tokens of a sample -> ids of all samples, those of a context side by side
Ask = Callable[[list[list[int]], int, int], list[list[int]]]


def play(setting: RolloutSetting, ask: Ask) -> None:
    """One round. RuntimeError if a sample has not exactly the length asked for."""

    def checked(contexts: list[list[int]], copies: int, tokens: int) -> list[list[int]]:
        written = ask(contexts, copies, tokens)
        lengths = sorted({len(ids) for ids in written})
        if len(written) != len(contexts) * copies or lengths != [tokens]:
            raise RuntimeError(
                f"{len(contexts) * copies} samples of {tokens} tokens were asked for, {len(written)} of {lengths} came"
            )
        return written

    if setting.shape.branches:
        _play_branches(setting, checked)
    else:
        _play_turns(setting, checked)


def _play_turns(setting: RolloutSetting, ask: Ask) -> None:
    shape = setting.shape
    contexts, copies = setting.prompts(), shape.group
    for turn, tokens in enumerate(shape.turns):
        written = ask(contexts, copies, tokens)
        if turn + 1 == len(shape.turns):
            return
        shown = _each([setting.tokenizer.encode(texts[turn]) for texts in setting.appended], shape.group)
        contexts = [a + b + c for a, b, c in zip(_each(contexts, copies), written, shown, strict=True)]
        copies = 1


def _play_branches(setting: RolloutSetting, ask: Ask) -> None:
    shape = setting.shape
    reason, evidence, answer = shape.turns
    written = ask(setting.prompts(), shape.group, reason + evidence)
    prompts, questions = _each(setting.prompts(), shape.group), _each(setting.question_ids(), shape.group)
    ask([prompt + ids for prompt, ids in zip(prompts, written, strict=True)], 1, answer)
    ask([prompt + ids[:reason] for prompt, ids in zip(prompts, written, strict=True)], 1, answer)
    ask([question + ids[reason:] for question, ids in zip(questions, written, strict=True)], 1, answer)


def _each(contexts: Sequence[list[int]], copies: int) -> list[list[int]]:
    return [context for context in contexts for _ in range(copies)]
