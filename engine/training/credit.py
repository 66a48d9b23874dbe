"""An advantage for each trained token: by turns, by anchor states, by a reward's spans, or by a branch's reward.

    turn     A_ik = G_ik - b_ik, the return-to-go of turn k minus a baseline of the group's others   rewards/credit.py
    anchor   A_i + omega A_ik: the trajectory in its group, and the turn among the group's turns from the same state
    token    A_i, plus the value of each span of the reward that overlaps the token's bytes
    tree     G w_n A_n of the node n that the token's turn is, by tree_advantages                    rewards/credit.py

The nodes of a forest are the turns of the group's trajectories. Turns that a trajectory inherited (`Trajectory.forked`)
are nodes of the sample that wrote them. The parent of a tree's first turns is a node without tokens, the prompt. A leaf
is a trajectory's last turn, with its whole return. The rule's weights w_n belong to a sum in which each of the G
independent samples of a group would have 1 / G, as in build_train_sequences. A token's advantage is therefore A_n times
w_n / (1 / G). If nothing is forked that is A_n; with leave-one-out it is then 1 + across times the trajectory's.

A trained branch has the trajectory's A_i ("trajectory"), whatever rule its own turns follow; with "tree" it has its
leaf's. If the reward has `RewardResult.branches`, a branch has the advantage of its own reward among the group's
branches of the same name.

Rewards of turns are `RewardResult.turns`; the trajectory's own reward is added to that of its last turn. A state is the
ids before a turn: all of its context ("context"), or those since the previous turn ("observation"). A span is a range
of bytes in the concatenated turns of the policy.
"""

import math
from collections.abc import Mapping, Sequence
from random import Random

from thresher.common.errors import UserError, as_number, shown
from thresher.engine.config.sections import GrpoSection
from thresher.engine.packing import grpo_advantages
from thresher.engine.protocol.trajectory import Trajectory, trained_contexts, turns
from thresher.engine.scoring.score import Scored
from thresher.policy.tokenizer import Tokenizer
from thresher.rewards.credit import anchor_advantages, tree_advantages, turn_advantages
from thresher.rewards.reward import Source

Span = tuple[int, int, float]  # of a reward: start and end byte in the policy's text, and the value
Values = list[list[float]]  # for each trajectory, one value per turn or sampled token


def token_advantages(
    scored: Sequence[Scored],
    rewards: Sequence[float],
    advantages: Sequence[float],
    branches: Sequence[Mapping[str, float]],
    grpo: GrpoSection,
    tokenizer: Tokenizer,
    seed: int,
) -> Values:
    """Return the advantage of each trained token (`trained_contexts`), by `grpo.advantage`. UserError for a reward
    whose turns or spans do not fit its trajectory.

    rewards, advantages: one per trajectory. branches: from `branch_advantages`. seed: seed of the control that shuffles
    rewards. It also shuffles the rewards of turns among all turns of a group, and the values of spans among its spans.
    """
    if grpo.advantage == "trajectory":
        own = [[value] * entry.trajectory.count(Source.POLICY) for entry, value in zip(scored, advantages, strict=True)]
    elif grpo.advantage == "token":
        spans = _spans(scored, grpo.shuffle_rewards, seed)
        own = [_of_spans(*each, tokenizer) for each in zip(scored, advantages, spans, strict=True)]
    else:
        own = _by_turns(scored, rewards, grpo, seed)
    if grpo.advantage == "tree":
        advantages = [values[-1] if values else whole for values, whole in zip(own, advantages, strict=True)]
    return [_of_trained(*each) for each in zip(scored, own, advantages, branches, strict=True)]


def _of_trained(entry: Scored, own: list[float], advantage: float, branches: Mapping[str, float]) -> list[float]:
    """Return the advantage of each trained token. own: of each token of the trajectory's own turns; inherited ones are
    not trained. advantage: of the trajectory, and of its branches that are not in `branches`."""
    trained = trained_contexts(entry.trajectory)
    own_tokens = sum(len(context.positions) for context in trained if context.branch is None)
    values = own[len(own) - own_tokens :]
    for context in trained:
        if context.branch is not None:
            values += [branches.get(context.branch, advantage)] * len(context.positions)
    return values


def branch_rewards(scored: Sequence[Scored], shuffle: bool, seed: int) -> list[dict[str, float]]:
    """Return, for each trajectory, the rewards of its branches that have their own, by name. UserError for a branch
    that is not trained, and for a value that is not a number.

    shuffle: the control: shuffle the rewards of the branches of the same name in a group, by the seed.
    """
    found = [_rewarded_branches(entry) for entry in scored]
    if shuffle:
        members: dict[tuple[int, str], list[dict[str, float]]] = {}
        for entry, rewards in zip(scored, found, strict=True):
            for name in rewards:
                members.setdefault((entry.trajectory.group, name), []).append(rewards)
        for (group, name), branches in members.items():
            drawn = [rewards[name] for rewards in branches]
            Random(f"{seed} {group} {name}").shuffle(drawn)
            for rewards, value in zip(branches, drawn, strict=True):
                rewards[name] = value
    return found


def branch_advantages(
    rewards: Sequence[Mapping[str, float]], groups: Sequence[int], grpo: GrpoSection
) -> list[dict[str, float]]:
    """Return, for each trajectory, the advantages of its branches by name, each among those of its name.

    rewards: from `branch_rewards`. groups: the group of each trajectory.
    """
    found: list[dict[str, float]] = [{} for _ in rewards]
    for name in dict.fromkeys(name for own in rewards for name in own):
        numbers = [n for n, own in enumerate(rewards) if name in own]
        values = grpo_advantages([rewards[n][name] for n in numbers], [groups[n] for n in numbers], grpo)
        for n, value in zip(numbers, values, strict=True):
            found[n][name] = value
    return found


def _rewarded_branches(entry: Scored) -> dict[str, float]:
    """Return the rewards of a trajectory's branches. UserError as in `branch_rewards`."""
    given, branches = entry.result.branches or {}, entry.trajectory.branches
    trained = [name for name, branch in branches.items() if branch.in_loss]
    # A call that was taken over from another sample is trained in that sample.
    taken_over = {name for name, branch in branches.items() if branch.trained and not branch.in_loss}
    given = {name: value for name, value in given.items() if name not in taken_over}
    for name, value in given.items():
        if name not in trained:
            raise UserError(
                f"the reward of question {entry.question.id} has a value for the branch {shown(name)}; expected names "
                f"of the trajectory's trained branches: {', '.join(trained) or 'it has none'}"
            )
        if as_number(value) is None:
            raise UserError(
                f"the reward of question {entry.question.id} has {shown(value)} for the branch {name}; expected a "
                "finite number"
            )
    return {name: float(value) for name, value in given.items()}


def _by_turns(scored: Sequence[Scored], rewards: Sequence[float], grpo: GrpoSection, seed: int) -> Values:
    """Return the advantage of each token of the trajectories' own turns: that of its turn."""
    members: dict[int, list[int]] = {}
    for n, entry in enumerate(scored):
        members.setdefault(entry.trajectory.group, []).append(n)
    result: Values = [[] for _ in scored]
    for group, numbers in members.items():
        own = [_of_turns(scored[n]) for n in numbers]
        if grpo.shuffle_rewards:
            pool = [value for values in own for value in values]
            Random(seed + group).shuffle(pool)
            drawn = iter(pool)
            own = [[next(drawn) for _ in values] for values in own]
        for values, n in zip(own, numbers, strict=True):
            if values:
                values[-1] += rewards[n]
        found = _of_group([scored[n].trajectory for n in numbers], own, grpo)
        for n, values in zip(numbers, found, strict=True):
            written = zip(values, turns(scored[n].trajectory), strict=True)
            result[n] = [value for value, turn in written for _ in turn.ids]
    return result


def _of_group(trajectories: Sequence[Trajectory], rewards: Values, grpo: GrpoSection) -> Values:
    """Return the advantage of each turn of a group's trajectories; a trajectory without turns is left out."""
    some = [n for n, own in enumerate(rewards) if own]
    if not some:
        return rewards
    chosen, alone = [rewards[n] for n in some], grpo.baseline == "none"
    if grpo.advantage == "tree":
        found = _of_forest([trajectories[n] for n in some], [math.fsum(own) for own in chosen], grpo)
    elif grpo.advantage == "turn":
        found = turn_advantages(chosen, gamma=grpo.gamma, baseline="none" if alone else "leave_one_out")
    else:
        found = anchor_advantages(
            chosen,
            [_states(trajectories[n], grpo.anchor == "observation") for n in some],
            gamma=grpo.gamma,
            omega=grpo.omega,
            baseline="group" if grpo.baseline == "group" else "leave_one_out",
            std_floor=grpo.std_floor if grpo.scale == "group" else None,
            sample_std=grpo.sample_std,
            eps=grpo.std_eps,
        )
    by_number = dict(zip(some, found, strict=True))
    return [by_number.get(n, []) for n in range(len(rewards))]


def _of_forest(trajectories: Sequence[Trajectory], returns: Sequence[float], grpo: GrpoSection) -> Values:
    """Return the advantage of each turn of a group's trajectories, given in the order of their samples."""
    parents: list[int] = []
    rewards: list[float | None] = []
    paths: dict[int, list[int]] = {}  # sample -> the nodes of its tree's prompt and of its turns

    def add(parent: int) -> int:
        parents.append(parent)
        rewards.append(None)
        return len(parents) - 1

    for trajectory, total in zip(trajectories, returns, strict=True):
        sample, inherited = trajectory.forked or (trajectory.sample, 0)
        path = paths.setdefault(sample, [])[: inherited + 1]
        if not path:
            paths[sample] = path = [add(-1)]
        for _ in range(sum(1 for _ in turns(trajectory)) - inherited):
            path = [*path, add(path[-1])]
        paths[trajectory.sample] = path
        rewards[path[-1]] = total
    std_floor = grpo.std_floor if grpo.scale == "group" else None
    credit = tree_advantages(
        parents,
        rewards,
        across=grpo.across,
        baseline="group" if grpo.baseline == "group" else "leave_one_out",
        std_floor=std_floor,
        sample_std=grpo.sample_std,
        eps=grpo.std_eps,
    )
    values = [len(trajectories) * w * a for a, w in zip(credit.advantages, credit.weights, strict=True)]
    return [[values[node] for node in paths[trajectory.sample][1:]] for trajectory in trajectories]


def _of_turns(entry: Scored) -> list[float]:
    """Return the rewards of a trajectory's turns, without the trajectory's own reward."""
    count, given = sum(1 for _ in turns(entry.trajectory)), entry.result.turns
    if given is None:
        return [0.0] * count
    if len(given) != count or any(as_number(value) is None for value in given):
        raise UserError(
            f"the reward of question {entry.question.id} has turns = {shown(list(given))}; expected a finite number "
            f"for each of the trajectory's {count} turns"
        )
    return [float(value) for value in given]


def _states(trajectory: Trajectory, observation: bool) -> list[tuple[int, ...]]:
    states: list[tuple[int, ...]] = []
    seen: list[int] = []
    for segment in trajectory.segments:
        if segment.source is Source.PROMPT:
            seen = []
        if segment.source is Source.POLICY:
            states.append(tuple(seen))
        seen = [] if observation and segment.source is Source.POLICY else [*seen, *segment.ids]
    return states


def _spans(scored: Sequence[Scored], shuffle: bool, seed: int) -> list[list[Span]]:
    """Return the spans of each trajectory's reward. shuffle: the control: shuffle their values within a group."""
    found = [list(entry.result.tokens or ()) for entry in scored]
    if not shuffle:
        return found
    for group in dict.fromkeys(entry.trajectory.group for entry in scored):
        own = [spans for entry, spans in zip(scored, found, strict=True) if entry.trajectory.group == group]
        values = [value for spans in own for _, _, value in spans]
        Random(f"{seed} {group} spans").shuffle(values)
        drawn = iter(values)
        for spans in own:
            spans[:] = [(start, stop, next(drawn)) for start, stop, _ in spans]
    return found


def _of_spans(entry: Scored, advantage: float, spans: Sequence[Span], tokenizer: Tokenizer) -> list[float]:
    """Return the trajectory's advantage for each token, plus the values of the spans that overlap the token's bytes."""
    ids = [token for turn in turns(entry.trajectory) for token in turn.ids]
    bounds = [0]
    for token in ids:
        bounds.append(bounds[-1] + len(tokenizer.decode_bytes([token])))
    values = [advantage] * len(ids)
    for span in spans:
        start, stop, value = span
        if not 0 <= start < stop <= bounds[-1] or not math.isfinite(value):
            raise UserError(
                f"the reward of question {entry.question.id} has the span {shown(list(span))}; expected (start, end, "
                f"value) with 0 <= start < end <= {bounds[-1]}, the bytes that the policy wrote, and a finite value"
            )
        for n in range(len(ids)):
            if bounds[n] < stop and bounds[n + 1] > start:
                values[n] += value
    return values
