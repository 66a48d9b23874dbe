"""Index tensors of a cached attention: which rows attend to which blocks. paged_cuda.py takes them, on the device.

A position p of a sequence lies in block table[p // S], slot p % S. All tensors are int32. Nothing here depends on a
value that only the device knows, so that a CUDA graph may hold the tensors and replay with others in them.

Axes: B sequences, N runs, G groups of sequences with a common prefix, M members of a group, P blocks of a table, S
slots of a block, K key/value heads (docs/notation.md).
"""

from dataclasses import dataclass

from torch import Tensor

KEYS = 64  # keys that a program reads at a time
BLOCKS_PER_SM = 3  # blocks that a multiprocessor holds of the decoding kernel at D 128, by its shared memory
PREFIX_BLOCKS_PER_SM = 1  # a part more is a part more to merge for every member
USUAL_MEMBERS = 8  # of a group
# A prefix pass costs a launch and a part to merge for every member. Cascades are said to lose at 128 tokens and to win
# from a few hundred on; not measured here yet.
PREFIX_TOKENS = 256


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Groups of sequences whose first `length` keys lie in the same blocks. A sequence is a member of one group at
    most.

    table_GP: the prefix's blocks. length_G: its keys, a multiple of S; 0: the group does not exist.
    members_GM: numbers of sequences, -1 behind the last.
    """

    table_GP: Tensor
    length_G: Tensor
    members_GM: Tensor


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """B sequences with Q rows each: 1, or 1 and drafts. Row i sees keys 0 .. start + i; its own is already written.

    table_BP: blocks of each sequence. start_B: position of its first row. count_B: rows that exist, 0 .. Q; the rest
    give zeros. first_B: keys before this position, a multiple of S, are the shared prefix's business: a member's is its
    group's length, any other sequence's 0; None: 0 everywhere.
    """

    table_BP: Tensor
    start_B: Tensor
    count_B: Tensor
    first_B: Tensor | None = None
    prefix: SharedPrefix | None = None


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """N runs of new rows over history: prompts, passages, drafts.

    table_NP: blocks of each run's sequence. row_N: the run's first row in q_TND. start_N: that row's position.
    count_N: the run's rows, 0 .. longest. longest: decides the grid, and so is the host's.
    """

    table_NP: Tensor
    row_N: Tensor
    start_N: Tensor
    count_N: Tensor
    longest: int


def decode_splits(sequences: int, kv_heads: int, keys: int, sms: int) -> int:
    """Parts into which a sequence's keys are cut, so that `sms` multiprocessors are full.

    keys: the most that its table holds. A bucket's shape decides it, and not how long its sequences are.
    """
    wanted = -(-BLOCKS_PER_SM * sms // max(1, sequences * kv_heads))
    return max(1, min(wanted, -(-keys // KEYS)))


def prefix_splits(sequences: int, kv_heads: int, keys: int, sms: int) -> int:
    """Parts into which a prefix's keys are cut, so that `sms` multiprocessors are full where all sequences share theirs
    in groups of the usual size. As many groups as there may be would give parts for too few."""
    programs = -(-sequences // USUAL_MEMBERS) * kv_heads
    wanted = -(-PREFIX_BLOCKS_PER_SM * sms // max(1, programs))
    return max(1, min(wanted, -(-keys // KEYS)))


def prefix_pays(length: int, members: int) -> bool:
    """Return whether `members` sequences should read `length` common keys once, in a separate pass."""
    return members > 1 and length >= PREFIX_TOKENS
