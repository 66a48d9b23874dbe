"""Index tensors of a cached attention: which rows attend to which blocks. paged_cuda.py takes them, on the device.

A position p of a sequence is in block table[p // S], slot p % S. All tensors are int32. Nothing here depends on a value
that only the device has, so a CUDA graph can capture the tensors and be replayed with other values in them.

Axes: B sequences, N runs, G groups of sequences with a common prefix, M members of a group, P blocks of a table, S
slots of a block, K key/value heads (docs/notation.md).
"""

from dataclasses import dataclass

from torch import Tensor

KEYS = 64  # keys that a program reads at a time
BLOCKS_PER_SM = 3  # parts of sequences per multiprocessor; 4 (sm_80) to 6 (sm_90) would fit at D 128, not tried
PREFIX_BLOCKS_PER_SM = 1  # each further part has to be merged for every member
USUAL_MEMBERS = 8  # of a group
# A prefix pass costs a launch, and a part to merge for every member. Cascades are reported to be slower at 128 tokens
# and faster from a few hundred on; not measured here yet.
PREFIX_TOKENS = 256


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Groups of sequences whose first `length` keys are in the same blocks. A sequence is in at most one group.

    table_GP: the prefix's blocks. length_G: its keys, a multiple of S; 0: the group does not exist.
    members_GM: numbers of sequences, -1 after the last.
    """

    table_GP: Tensor
    length_G: Tensor
    members_GM: Tensor


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """B sequences with Q rows each: 1, or 1 and drafts. Row i sees keys 0 .. start + i; its own is already written.

    table_BP: blocks of each sequence. start_B: position of its first row. count_B: rows that exist, 0 .. Q; the rest
    give zeros. first_B: position, a multiple of S, before which keys belong to the shared prefix: the group's length
    for a member, 0 for any other sequence; None: 0 everywhere.
    """

    table_BP: Tensor
    start_B: Tensor
    count_B: Tensor
    first_B: Tensor | None = None
    prefix: SharedPrefix | None = None


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """N runs of new rows after a history: prompts, passages, drafts.

    table_NP: blocks of each run's sequence. row_N: the run's first row in q_TND. start_N: that row's position.
    count_N: the run's rows, 0 .. longest. longest: determines the grid, so it is on the host.
    """

    table_NP: Tensor
    row_N: Tensor
    start_N: Tensor
    count_N: Tensor
    longest: int


def decode_splits(sequences: int, kv_heads: int, keys: int, sms: int) -> int:
    """Return the number of parts of a sequence's keys with which `sms` multiprocessors are full.

    keys: the most that its table can have. It depends on a bucket's shape, not on the lengths of its sequences.
    """
    wanted = -(-BLOCKS_PER_SM * sms // max(1, sequences * kv_heads))
    return max(1, min(wanted, -(-keys // KEYS)))


def prefix_splits(sequences: int, kv_heads: int, keys: int, sms: int) -> int:
    """Return the number of parts of a prefix's keys with which `sms` multiprocessors are full.

    It assumes that all sequences are in groups of the usual size. The largest possible number of groups would give too
    few parts."""
    programs = -(-sequences // USUAL_MEMBERS) * kv_heads
    wanted = -(-PREFIX_BLOCKS_PER_SM * sms // max(1, programs))
    return max(1, min(wanted, -(-keys // KEYS)))


def prefix_pays(length: int, members: int) -> bool:
    """Return whether `members` sequences should read `length` common keys once, in a separate pass."""
    return members > 1 and length >= PREFIX_TOKENS
