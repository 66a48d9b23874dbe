"""One decode step of a batch as a function of buffers that stay where they are, so that a CUDA graph may hold it.

    load      what the host has to say of the step's sequences, in one copy: lanes, positions, blocks, shared prefixes,
              and the drafts
    run       feed each lane's last token and the drafts behind it, draw a token at each row, put away those that stand:
              on the device, with nothing read back
    launch    run, or replay its graph, and have what was drawn copied to pinned memory (verify.py)

Batches are filled up to a size of `bucket_of`, and rows to 1 or 1 + a number of drafts of STACKED; sequences that fill
one up are on the spare lane, and what fills up writes to no block.

Axes: N sequences of a step, padded to a bucket of B; Q rows of a sequence, 1 + K drafts, T = B Q of all; P blocks of a
sequence; G groups that share a prefix, of M members; H hidden, V vocabulary, L tokens of a lane; X int32 of what a
sequence's rows have drawn.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from thresher.engine.decoding.cache.kv_cache import DeviceKV
from thresher.engine.decoding.clock import Lap
from thresher.engine.decoding.drafts import STACKED
from thresher.engine.decoding.lanes import Lanes, StopBank
from thresher.engine.decoding.verify import Bools, Drawn, DrawnRows, drawn_width, pack_drawn, what_stands
from thresher.kernels import sampling
from thresher.kernels.attention.cached import DecodeRows, SharedPrefix, decode_attention, prefix_pays
from thresher.kernels.attention.paged import Ints
from thresher.kernels.layers import rotate_and_store
from thresher.policy.model import Policy

MEMBERS = 16  # of a group that shares a prefix; a larger one is several groups
IN_THE_AIR = 2  # steps that may be under way: buffers that the host fills or reads alternate


@dataclass(slots=True)
class Flight:
    """A decode step that was launched and not yet read. position_N: of the first token that each sequence draws;
    drafted_N: how many drafts follow it. alive_N: sequences that still want theirs; room_N: tokens that the turn may
    have after the first. laps: of the forwards since the flight before, and of this one (DecodeClock.add)."""

    lane_N: Ints
    position_N: Ints
    drafted_N: Ints
    alive_N: Bools
    room_N: Ints
    rows: DrawnRows
    laps: list[tuple[Lap, float]]

    @property
    def drafts(self) -> bool:
        """Whether how many tokens it draws is known only when it has been read."""
        return bool(self.drafted_N.any())

    def read(self) -> Drawn:
        """What it drew, once it is there."""
        return self.rows.read(len(self.lane_N))


class BucketStep:
    """One decode step of up to `size` sequences with up to `drafts` drafts each, as a function of buffers: `load` fills
    them, `run` is pure on the device, `launch` runs it (as a graph on CUDA) and has the result copied."""

    def __init__(
        self,
        size: int,
        drafts: int,
        shares: bool,
        *,
        policy: Policy,
        columns: int,
        cache: DeviceKV,
        lanes: Lanes,
        stops: StopBank,
    ) -> None:
        self.size, self.policy, self.columns, self.cache = size, policy, columns, cache
        self.lanes, self.stops, self.rules = lanes, stops, lanes.rules
        device, blocks = policy.device, lanes.table_BP.shape[1]
        self.groups = max(size // 2, 1) if shares else 0
        shapes = {
            "lane": (size,),
            "start": (size,),
            "count": (size,),
            "first": (size,),
            "table": (size, blocks),
            "prefix": (self.groups, blocks),
            "length": (self.groups,),
            "members": (self.groups, MEMBERS),
            "drafts": (size, drafts),
        }
        sizes = {name: int(np.prod(shape)) for name, shape in shapes.items()}
        self.sent = torch.zeros(sum(sizes.values()), dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self.staging = [torch.zeros(self.sent.shape, dtype=torch.int32, pin_memory=pinned) for _ in range(IN_THE_AIR)]
        self.packed_BX = torch.zeros(size, drawn_width(1 + drafts), dtype=torch.int32, device=device)
        self.received = [
            torch.zeros(self.packed_BX.shape, dtype=torch.int32, pin_memory=pinned) for _ in range(IN_THE_AIR)
        ]
        self.turn = 0
        self.row_Q = torch.arange(1 + drafts, device=device)
        self.shapes, self.sizes = shapes, list(sizes.values())
        self.inputs = dict(zip(shapes, self._views(self.sent), strict=True))
        self.rows = DecodeRows(
            self.inputs["table"],
            self.inputs["start"],
            self.inputs["count"],
            self.inputs["first"] if shares else None,
            SharedPrefix(self.inputs["prefix"], self.inputs["length"], self.inputs["members"]) if shares else None,
        )
        self.graph: torch.cuda.CUDAGraph | None = None

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        parts = flat.split(self.sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes.values(), strict=True)]

    def load(
        self, lane_N: Ints, start_N: Ints, table_NP: Ints, prefix: "Prefixes | None", drafts_NK: Ints, drafted_N: Ints
    ) -> None:
        """What the host has to say of a step's sequences, in one copy. start_N: the positions of their last tokens,
        which they feed; drafts_NK: guesses, of which they have drafted_N, and K is the step's."""
        count = len(lane_N)
        self.turn = (self.turn + 1) % IN_THE_AIR
        staging = self.staging[self.turn]
        lane, start, rows, first, table, prefix_GP, length, members, drafts = (x.numpy() for x in self._views(staging))
        staging.zero_()
        lane[:] = self.lanes.spare
        lane[:count], start[:count], rows[:count], table[:count] = lane_N, start_N, 1 + drafted_N, table_NP
        drafts[:count] = drafts_NK
        if prefix is not None:
            groups = len(prefix.length_G)
            first[:count] = prefix.first_N
            members[:] = -1
            prefix_GP[:groups], length[:groups], members[:groups] = prefix.table_GP, prefix.length_G, prefix.members_GM
        self.sent.copy_(staging, non_blocking=True)

    def run(self) -> None:
        """Feed, draw, put away what stands. Reads and writes buffers, nothing else."""
        lanes, row_Q = self.lanes, self.row_Q
        lane_B1, start_B1, count_B1 = (self.inputs[name].long()[:, None] for name in ("lane", "start", "count"))
        drafts_BK = self.inputs["drafts"].long()
        # Rows that a sequence does not have stand at the place of its last.
        position_BQ = start_B1 + torch.minimum(row_Q, (count_B1 - 1).clamp_(min=0))
        block_BQ = self.inputs["table"].gather(1, position_BQ // self.cache.slots)
        self.block_T = torch.where(row_Q < count_B1, block_BQ, -1).view(-1)
        self.slot_T = (position_BQ % self.cache.slots).int().view(-1)
        ids_BQ = torch.cat([lanes.tokens_BL[lane_B1, start_B1], drafts_BK], 1)
        lane_T, position_T = lane_B1.expand(-1, len(row_Q)).reshape(-1), position_BQ.view(-1)
        hidden_TH = self.policy.hidden(ids_BQ.view(-1), position_T, self._attend)
        head_VH = self.policy.head_VH[: self.columns]
        seeds_T, rules = lanes.seeds_B[lane_T], self.rules.take(lane_T)
        ids_T, logprobs_T = sampling.sample_from_head(hidden_TH, head_VH, seeds_T, position_T + 1, rules)
        ids_BQ, lane_B = ids_T.view(-1, len(row_Q)), lane_B1[:, 0]
        logprobs_BQ, state_B = logprobs_T.view_as(ids_BQ), lanes.state_B[lane_B]
        state_B, code_B, taken_B = what_stands(self.stops, state_B, ids_BQ, logprobs_BQ, drafts_BK, count_B1[:, 0] - 1)
        lanes.state_B[lane_B] = state_B
        lanes.tokens_BL[torch.where(row_Q < taken_B[:, None], lane_B1, lanes.spare), position_BQ + 1] = ids_BQ
        pack_drawn(ids_BQ, logprobs_BQ, code_B, taken_B, self.packed_BX)

    def _attend(self, layer: int, qkv_TMD: torch.Tensor, rope: torch.Tensor, kv_heads: int) -> torch.Tensor:
        k_PKSD, v_PKSD = self.cache.k_LPKSD[layer], self.cache.v_LPKSD[layer]
        q_TND = rotate_and_store(qkv_TMD, rope, kv_heads, k_PKSD, v_PKSD, self.block_T, self.slot_T)
        q_BQND = q_TND.unflatten(0, (self.size, len(self.row_Q)))
        return decode_attention(q_BQND, k_PKSD, v_PKSD, self.rows).flatten(0, 1)

    def launch(self) -> DrawnRows:
        """What it drew, on its way to the host."""
        received = self.received[self.turn]
        if self.graph is None:
            self.run()
        else:
            self.graph.replay()
        received.copy_(self.packed_BX, non_blocking=True)
        if self.policy.device.type != "cuda":
            return DrawnRows(received, None)
        done = torch.cuda.Event()
        done.record()
        return DrawnRows(received, done)

    def capture(self, pool: Any) -> None:
        """Make `run` a CUDA graph. Whatever the buffers hold is fed to the spare lane meanwhile."""
        self.staging[self.turn].zero_()
        self.staging[self.turn][: self.size] = self.lanes.spare
        self.sent.copy_(self.staging[self.turn])
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # compiles, and lets libraries allocate what they keep
                self.run()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.run()


@dataclass(slots=True)
class Prefixes:
    """Groups of a step's sequences that share their first blocks. first_N: where a sequence's own keys begin."""

    first_N: Ints
    table_GP: Ints
    length_G: Ints
    members_GM: Ints


def bucket_of(count: int) -> int:
    """The size of the bucket for so many sequences: powers of two up to 16, then multiples of 16."""
    return 1 << (count - 1).bit_length() if count <= 16 else -(-count // 16) * 16


def drafts_bucket(most: int) -> int:
    """The number of drafts for which there is a step, for so many."""
    return next(size for size in (0, *STACKED) if size >= most)


def shared_prefixes(table_NP: Ints, blocks_N: Ints, slots: int) -> Prefixes | None:
    """Which of a step's sequences share the first blocks_N of their blocks with others, where to read those once pays.
    table_NP: their blocks. A block that several hold stands for all that lies before it, too."""
    index_N = np.flatnonzero(blocks_N > 0)
    if not len(index_N):
        return None
    last_block, group_N = np.unique(table_NP[index_N, blocks_N[index_N] - 1], return_inverse=True)
    first_N = np.zeros(len(blocks_N), np.int64)
    tables, lengths, members = [], [], []
    for group in range(len(last_block)):
        of_group = index_N[group_N == group]
        length = int(blocks_N[of_group[0]]) * slots
        if not prefix_pays(length, len(of_group)):
            continue
        first_N[of_group] = length
        for begin in range(0, len(of_group), MEMBERS):
            some = of_group[begin : begin + MEMBERS]
            tables.append(table_NP[some[0]])
            lengths.append(length)
            members.append(np.pad(some, (0, MEMBERS - len(some)), constant_values=-1))
    if not tables:
        return None
    return Prefixes(first_N, np.stack(tables), np.array(lengths), np.stack(members))
