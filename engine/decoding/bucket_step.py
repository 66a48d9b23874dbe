"""One decode step of a batch as a function of buffers that stay where they are, so that a CUDA graph may hold it.

    load      what the host has to say of the step's sequences, in one copy: lanes, positions, blocks, shared prefixes
    run       feed each lane's last token, draw the next, put it away: on the device, with nothing read back
    launch    run, or replay its graph, and have the rows (id, log-prob's bits, code) copied to pinned memory

Batches are filled up to a size of `bucket_of`; rows that fill one up write to the spare lane and to no block.

Axes: N sequences of a step, padded to a bucket of B; P blocks of a sequence; G groups that share a prefix, of M
members; H hidden, V vocabulary, L tokens of a lane.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from thresher.engine.decoding.cache.kv_cache import DeviceKV
from thresher.engine.decoding.lanes import Lanes, StopBank
from thresher.kernels import sampling
from thresher.kernels.attention.cached import DecodeRows, SharedPrefix, decode_attention, prefix_pays
from thresher.kernels.attention.paged import Ints
from thresher.kernels.elementwise.layers import rotate_and_store
from thresher.policy.model import Policy

Int32s = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]

MEMBERS = 16  # of a group that shares a prefix; a larger one is several groups
IN_THE_AIR = 2  # steps that may be under way: buffers that the host fills or reads alternate


@dataclass(slots=True)
class Flight:
    """A decode step that was launched and not yet read. position_N: of the tokens that it draws. alive_N: sequences
    that still want theirs; last_N: those whose turn has no room for another."""

    lane_N: Ints
    position_N: Ints
    alive_N: Bools
    last_N: Bools
    packed_B3: torch.Tensor
    done: "torch.cuda.Event | None"

    def read(self) -> tuple[Ints, npt.NDArray[np.float32], Ints]:
        """ids, log-probs and codes [N], once they are there."""
        if self.done is not None:
            self.done.synchronize()
        rows: Int32s = self.packed_B3.numpy()[: len(self.lane_N)]
        return rows[:, 0].astype(np.int64), rows[:, 1].copy().view(np.float32), rows[:, 2].astype(np.int64)


class BucketStep:
    """One decode step of up to `size` sequences as a function of buffers: `load` fills them, `run` is pure on the
    device, `launch` runs it (as a graph on CUDA) and has the result copied. Rows that fill it up write to the spare
    lane and to no block."""

    def __init__(
        self, size: int, policy: Policy, columns: int, cache: DeviceKV, lanes: Lanes, stops: StopBank, shares: bool
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
        }
        sizes = {name: int(np.prod(shape)) for name, shape in shapes.items()}
        self.sent = torch.zeros(sum(sizes.values()), dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self.staging = [torch.zeros(self.sent.shape, dtype=torch.int32, pin_memory=pinned) for _ in range(IN_THE_AIR)]
        self.packed_B3 = torch.zeros(size, 3, dtype=torch.int32, device=device)
        self.received = [torch.zeros(size, 3, dtype=torch.int32, pin_memory=pinned) for _ in range(IN_THE_AIR)]
        self.turn = 0
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

    def load(self, lane_N: Ints, start_N: Ints, table_NP: Ints, prefix: "Prefixes | None") -> None:
        """What the host has to say of a step's sequences, in one copy. start_N: the positions that they feed."""
        count = len(lane_N)
        self.turn = (self.turn + 1) % IN_THE_AIR
        staging = self.staging[self.turn]
        lane, start, live, first, table, prefix_GP, length, members = (x.numpy() for x in self._views(staging))
        staging.zero_()
        lane[:] = self.lanes.spare
        lane[:count], start[:count], live[:count], table[:count] = lane_N, start_N, 1, table_NP
        if prefix is not None:
            groups = len(prefix.length_G)
            first[:count] = prefix.first_N
            members[:] = -1
            prefix_GP[:groups], length[:groups], members[:groups] = prefix.table_GP, prefix.length_G, prefix.members_GM
        self.sent.copy_(staging, non_blocking=True)

    def run(self) -> None:
        """Feed every lane's last token, draw the next, put it away. Reads and writes buffers, nothing else."""
        lanes, start = self.lanes, self.inputs["start"]
        lane_B, position_B = self.inputs["lane"].long(), start.long()
        slots, live_B = self.cache.slots, self.inputs["count"]
        block_B = self.inputs["table"].gather(1, (position_B // slots)[:, None])[:, 0]
        self.block_B = torch.where(live_B > 0, block_B, -1)
        self.slot_B = start % slots
        hidden_BH = self.policy.hidden(lanes.tokens_BL[lane_B, position_B], position_B, self._attend)
        head_VH = self.policy.head_VH[: self.columns]
        seeds_B, rules = lanes.seeds_B[lane_B], self.rules.take(lane_B)
        ids_B, logprobs_B = sampling.draw_from_head(hidden_BH, head_VH, seeds_B, position_B + 1, rules)
        lanes.tokens_BL[lane_B, position_B + 1] = ids_B
        state_B, code_B = self.stops.advance(lanes.state_B[lane_B], ids_B)
        lanes.state_B[lane_B] = state_B
        packed = (ids_B.int(), logprobs_B.float().view(torch.int32), code_B.int())
        torch.stack(packed, 1, out=self.packed_B3)

    def _attend(self, layer: int, qkv_TMD: torch.Tensor, rope: torch.Tensor, kv_heads: int) -> torch.Tensor:
        k_PKSD, v_PKSD = self.cache.k_LPKSD[layer], self.cache.v_LPKSD[layer]
        q_BND = rotate_and_store(qkv_TMD, rope, kv_heads, k_PKSD, v_PKSD, self.block_B, self.slot_B)
        return decode_attention(q_BND[:, None], k_PKSD, v_PKSD, self.rows)[:, 0]

    def launch(self) -> tuple[torch.Tensor, "torch.cuda.Event | None"]:
        """(where the packed rows will be, the event that says so)."""
        received, done = self.received[self.turn], None
        if self.policy.device.type != "cuda":
            self.run()
            received.copy_(self.packed_B3)
            return received, None
        if self.graph is None:
            self.run()
        else:
            self.graph.replay()
        received.copy_(self.packed_B3, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return received, done

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
