"""What was drawn goes into the lanes: the tokens that stand, their log-probs, and the stop automaton's states.

A sequence without drafts has one row, and what was drawn there is its next token. With drafts a token was drawn behind
each of them, and those stand that would have been drawn one by one: the first always; the next only if the draft before
it was what was drawn there, and did not end the turn. So drafts are walked through column by column, for all sequences
at once, in operations whose shapes are known beforehand: a CUDA graph may hold them.

What a GPU has drawn comes to the host in one copy, a row of int32 a sequence (`pack_drawn`, `DrawnRows`).

Axes: B lanes, L tokens of a lane, N sequences that draw, Q rows of each, its last token's and its drafts' (K = Q - 1),
F the rows of all where some have fewer, one sequence after the other.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from thresher.engine.decoding.lanes import Lanes, StopBank
from thresher.kernels.attention.paged import places

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NOT_FINITE = -1  # in the place of a code of `StopBank.advance`: the token's log-prob is NaN or infinite


class Drawn(NamedTuple):
    """What a step drew of each sequence, on the host: ids and log-probs of its rows, the code of `advance` for the last
    token that stands, and how many stand."""

    ids_NQ: Ints
    logprobs_NQ: npt.NDArray[np.float32]
    code_N: Ints
    taken_N: Ints

    def of(self, some_N: Bools) -> "Drawn":
        """These sequences'."""
        return Drawn(self.ids_NQ[some_N], self.logprobs_NQ[some_N], self.code_N[some_N], self.taken_N[some_N])

    @property
    def stands_NQ(self) -> Bools:
        stands: Bools = np.arange(self.ids_NQ.shape[1]) < self.taken_N[:, None]
        return stands


class DrawnRows(NamedTuple):
    """`Drawn` on its way: a row of `pack_drawn` a sequence, and more behind them. done: None where they are there."""

    rows_BX: torch.Tensor
    done: "torch.cuda.Event | None"

    def read(self, count: int) -> Drawn:
        """The first `count` sequences', once they are there."""
        if self.done is not None:
            self.done.synchronize()
        columns_XN = np.ascontiguousarray(self.rows_BX.numpy()[:count].T)
        code_N, taken_N = columns_XN[:2].astype(np.int64)
        ids_QN, logprobs_QN = np.split(columns_XN[2:], 2)
        return Drawn(ids_QN.T.astype(np.int64), logprobs_QN.view(np.float32).T, code_N, taken_N)


def drawn_width(rows: int) -> int:
    """int32 of a row of `pack_drawn`, for so many rows of a sequence."""
    return 2 + 2 * rows


def pack_drawn(
    ids_NQ: torch.Tensor, logprobs_NQ: torch.Tensor, code_N: torch.Tensor, taken_N: torch.Tensor, out_NX: torch.Tensor
) -> None:
    """A row a sequence, int32: code, taken, ids (below 2^31), and the bits of the log-probs."""
    columns = (code_N.int()[:, None], taken_N.int()[:, None], ids_NQ.int(), logprobs_NQ.float().view(torch.int32))
    torch.cat(columns, 1, out=out_NX)


def advance(
    stops: StopBank, state_N: torch.Tensor, ids_N: torch.Tensor, logprobs_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`StopBank.advance`, with the code NOT_FINITE where the drawn token's log-prob is no finite number.

    A logit of NaN or +inf anywhere in a row makes the log-prob NaN, and so does a row of -inf alone. A column of -inf
    beside finite ones is a masked column, and legitimate. The code is read back in any case, so the check costs no
    transfer of its own.
    """
    state_N, code_N = stops.advance(state_N, ids_N)
    return state_N, torch.where(logprobs_N > -torch.inf, code_N, NOT_FINITE)  # of NaN, too, this is False


def what_stands(
    stops: StopBank,
    state_N: torch.Tensor,
    ids_NQ: torch.Tensor,
    logprobs_NQ: torch.Tensor,
    drafts_NK: torch.Tensor,
    drafted_N: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(the automaton's states behind the last token that stands, its codes, how many stand), int64 [N].

    ids_NQ: drawn, the first behind what is known, the others behind the drafts, of which a sequence has drafted_N."""
    state_N, code_N = advance(stops, state_N, ids_NQ[:, 0], logprobs_NQ[:, 0])
    taken_N = torch.ones_like(code_N)
    if not drafts_NK.shape[1]:
        return state_N, code_N, taken_N
    true_NK = ids_NQ[:, :-1] == drafts_NK
    true_NK &= torch.arange(drafts_NK.shape[1], device=drafted_N.device) < drafted_N[:, None]
    alive_N = code_N == 0
    for column in range(drafts_NK.shape[1]):
        alive_N = alive_N & true_NK[:, column]
        next_N, found_N = advance(stops, state_N, ids_NQ[:, column + 1], logprobs_NQ[:, column + 1])
        state_N, code_N = torch.where(alive_N, next_N, state_N), torch.where(alive_N, found_N, code_N)
        taken_N = taken_N + alive_N
        alive_N = alive_N & (code_N == 0)
    return state_N, code_N, taken_N


def keep_drawn(
    lanes: Lanes, stops: StopBank, lane_N: Ints, drafted_N: Ints, ids_F: torch.Tensor, logprobs_F: torch.Tensor
) -> tuple[Ints, Ints]:
    """Per sequence the code of `advance` for its last token, and how many tokens stand.

    Between the ends of turns this is the one place where a step reads back from the device, in one copy.
    """
    first_N, known_N, left_N, lane = (
        torch.from_numpy(x).to(lanes.device)
        for x in (np.cumsum(1 + drafted_N) - 1 - drafted_N, lanes.known_B[lane_N], drafted_N, lane_N)
    )
    if not drafted_N.any():
        lanes.tokens_BL[lane, known_N] = ids_F
        lanes.logprobs_BL[lane, known_N] = logprobs_F.float()
        lanes.state_B[lane], code_N = advance(stops, lanes.state_B[lane], ids_F, logprobs_F)
        return code_N.cpu().numpy(), np.ones_like(lane_N)
    # A sequence with fewer drafts has its last row again, where no draft is compared.
    column_NQ = torch.arange(int(drafted_N.max()) + 1, device=lanes.device).minimum(left_N[:, None])
    row_NQ, place_NQ, lane_N1 = first_N[:, None] + column_NQ, known_N[:, None] + column_NQ, lane[:, None]
    ids_NQ, logprobs_NQ = ids_F[row_NQ], logprobs_F[row_NQ].float()
    drafts_NK = lanes.tokens_BL[lane_N1, place_NQ[:, :-1]]
    lanes.state_B[lane], code_N, taken_N = what_stands(
        stops, lanes.state_B[lane], ids_NQ, logprobs_NQ, drafts_NK, left_N
    )
    # Behind what stands they are written, too, and written anew before they are read.
    lanes.tokens_BL[lane_N1, place_NQ] = ids_NQ
    lanes.logprobs_BL[lane_N1, place_NQ] = logprobs_NQ
    codes, taken = torch.stack([code_N, taken_N]).cpu().numpy()
    return codes, taken


def rows_of(lanes: Lanes, lane_N: Ints, drafted_N: Ints) -> tuple[torch.Tensor, torch.Tensor]:
    """(lane, position that is drawn) of every row [F], int64."""
    count_N = 1 + drafted_N
    position_F = np.repeat(lanes.known_B[lane_N], count_N) + places(count_N)
    lane_F, positions = (torch.from_numpy(x).to(lanes.device) for x in (np.repeat(lane_N, count_N), position_F))
    return lane_F, positions
