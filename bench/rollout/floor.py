"""The least time that a shape can take on this machine: its arithmetic at the rate of a bare matmul, or its memory
traffic at the rate of a bare copy, whichever is longer. Both rates are measured in the same run, with its threads.

The work is that of an engine which computes nothing twice and keeps the whole batch together: a prompt once for its
group, a passage once for its sample, every sampled token once; weights are read once for each token that a trajectory
writes, since it must have one before it can write the next; of keys and values everyone reads the own, a group the
shared ones once. EviOmni's (q, P, r) is a part of the trajectory, and q, which comes first, a part of the prompt: only
the evidence of (q, e) is fed anew.

Where weights and keys fit a cache, memory is faster than a copy of what does not; the arithmetic is then what counts.

Deliberately absent: the cost of norms, rotations, softmax and sampling.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from thresher.bench.measure import milliseconds
from thresher.bench.rollout.shapes import RolloutShape, Sizes

COPIED_BYTES, MATMUL, REPEATS = 2**27, 1024, 7
ITEM = 4  # bytes of a float32


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes read and written a second by a copy, operations a second by a matmul: the best of a few."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Stretch:
    """`tokens` fed one behind the other from position `start` on, in `copies` sequences; of what they attend to,
    `shared` positions belong to `group` of them at a time. written: token by token."""

    start: int
    tokens: int
    copies: int
    shared: int = 0
    group: int = 1
    written: bool = False


def measure_rates(device: torch.device | None = None) -> Rates:
    """Of a device, the CPU for None, in float32. Takes about a second, in the threads that torch has now."""
    device = device or torch.device("cpu")
    source = torch.ones(COPIED_BYTES // ITEM, device=device)
    target = torch.empty_like(source)
    left, right = torch.randn(2, MATMUL, MATMUL, device=device)
    product = torch.empty(MATMUL, MATMUL, device=device)
    copied = _best(lambda: target.copy_(source), device)
    multiplied = _best(lambda: torch.mm(left, right, out=product), device)
    return Rates(2 * COPIED_BYTES / copied, 2 * MATMUL**3 / multiplied)


def _best(run: Callable[[], object], device: torch.device) -> float:
    return min(milliseconds(run, device) for _ in range(REPEATS)) / 1e3


def stretches(shape: RolloutShape) -> list[Stretch]:
    """All that has to be fed. The last token of a sequence need not be, for nothing follows it."""
    found = [Stretch(0, shape.prompt, shape.questions)]
    at = shape.prompt
    for turn, tokens in enumerate(shape.turns):
        last = turn + 1 == len(shape.turns)
        found.append(Stretch(at, tokens - last, shape.samples, shape.prompt, shape.group, written=True))
        at += tokens
        if not last and shape.appended:
            found.append(Stretch(at, shape.appended, shape.samples, shape.prompt, shape.group))
            at += shape.appended
    if shape.branches:
        reason, evidence, answer = shape.turns
        behind = shape.prompt + reason
        found.append(Stretch(behind, answer - 1, shape.samples, shape.prompt, shape.group, written=True))
        found.append(Stretch(shape.question, evidence, shape.samples, shape.question, shape.group))
        behind = shape.question + evidence
        found.append(Stretch(behind, answer - 1, shape.samples, shape.question, shape.group, written=True))
    return found


def floor_seconds(shape: RolloutShape, rates: Rates) -> dict[str, Any]:
    """`seconds`, and what it is made of."""
    flops, moved = operations(shape), bytes_moved(shape)
    by = {"arithmetic": flops / rates.flops_per_s, "memory": moved / rates.bytes_per_s}
    bound = max(by, key=lambda name: by[name])
    return {
        "seconds": by[bound],
        "bound": bound,
        "flops": flops,
        "bytes": moved,
        "flops_per_s": rates.flops_per_s,
        "bytes_per_s": rates.bytes_per_s,
    }


def operations(shape: RolloutShape) -> int:
    """Multiplications and additions: weights, attention, and the head for each sampled token."""
    sizes = shape.sizes
    total = 2 * shape.tokens * sizes.hidden_size * sizes.vocab_size
    for stretch in stretches(shape):
        fed = stretch.tokens * stretch.copies
        total += 2 * _layer_weights(sizes) * sizes.num_hidden_layers * fed
        total += 4 * sizes.hidden_size * sizes.num_hidden_layers * stretch.copies * _attended(stretch)
    return total


def bytes_moved(shape: RolloutShape) -> int:
    """Weights for every step of a trajectory; keys and values, written once and read by every token that is written."""
    sizes = shape.sizes
    weights = _layer_weights(sizes) * sizes.num_hidden_layers + sizes.hidden_size * sizes.vocab_size
    total = ITEM * weights * sum(shape.turns)
    head = sizes.hidden_size // sizes.num_attention_heads
    token = ITEM * 2 * sizes.num_hidden_layers * sizes.num_key_value_heads * head
    for stretch in stretches(shape):
        total += token * stretch.tokens * stretch.copies
        if stretch.written:
            shared = stretch.shared * stretch.tokens
            total += token * (stretch.copies * (_attended(stretch) - shared) + stretch.copies // stretch.group * shared)
    return total


def _layer_weights(sizes: Sizes) -> int:
    kv = sizes.hidden_size // sizes.num_attention_heads * sizes.num_key_value_heads
    return sizes.hidden_size * (2 * sizes.hidden_size + 2 * kv + 3 * sizes.intermediate_size)


def _attended(stretch: Stretch) -> int:
    """Positions that the stretch's tokens attend to, themselves included, summed: start + 1, start + 2, .."""
    return stretch.tokens * stretch.start + stretch.tokens * (stretch.tokens + 1) // 2
