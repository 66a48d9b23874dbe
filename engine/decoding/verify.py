"""What was drawn goes into the lanes: the tokens that stand, their log-probs, and the stop automaton's states.

A sequence without drafts has one row, and what was drawn there is its next token. With drafts a token was drawn behind
each of them, and those stand that would have been drawn one by one: the first always; the next only if the draft before
it was what was drawn there, and did not end the turn. So drafts are walked through column by column, for all sequences
at once.

Axes: B lanes, L tokens of a lane, N sequences that draw, F rows at which they draw, 1 + drafts of each, one sequence
after the other.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from thresher.engine.decoding.lanes import Lanes, StopBank
from thresher.kernels.attention.paged import places

Ints = npt.NDArray[np.int64]


class Drawn(NamedTuple):
    """What a step drew of each sequence, on the host: the last token that stands, its log-prob, the code of
    `StopBank.advance` for it, and how many tokens stand."""

    ids_N: Ints
    logprobs_N: npt.NDArray[np.float32]
    code_N: Ints
    taken_N: Ints


class DrawnRows(NamedTuple):
    """`Drawn` on its way: a row of four int32 a sequence, the log-prob by its bits. done: None where it is there."""

    rows_N4: torch.Tensor
    done: "torch.cuda.Event | None"

    def read(self) -> Drawn:
        if self.done is not None:
            self.done.synchronize()
        columns_4N = np.ascontiguousarray(self.rows_N4.numpy().T)
        ids_N, code_N, taken_N = columns_4N[[0, 2, 3]].astype(np.int64)
        return Drawn(ids_N, columns_4N[1].view(np.float32), code_N, taken_N)


def send_drawn(ids_N: torch.Tensor, logprobs_N: torch.Tensor, code_N: torch.Tensor, taken_N: torch.Tensor) -> DrawnRows:
    """The four of `Drawn` (ids below 2^31) as one copy to the host, which waits for it when it reads, and not before:
    from CUDA into pinned memory."""
    columns = (ids_N.int(), logprobs_N.float().view(torch.int32), code_N.int(), taken_N.int())
    rows_N4 = torch.stack(columns, 1)
    if not rows_N4.is_cuda:
        return DrawnRows(rows_N4.cpu(), None)
    # torch keeps pinned memory for the next step, and knows when a copy is done with it.
    host_N4 = torch.empty(rows_N4.shape, dtype=rows_N4.dtype, pin_memory=True)
    host_N4.copy_(rows_N4, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    return DrawnRows(host_N4, done)


def reads_rows(device: torch.device) -> bool:
    """Whether what was drawn is read back in rows; a CPU reads it where it lies."""
    return device.type == "cuda"


def keep_drawn(
    lanes: Lanes, stops: StopBank, lane_N: Ints, drafted_N: Ints, ids_F: torch.Tensor, logprobs_F: torch.Tensor
) -> tuple[Ints, Ints]:
    """Per sequence the code of `StopBank.advance` for its last token, and how many tokens stand.

    Between the ends of turns this is the one place where a step reads back from the device, in one copy.
    """
    count_N = 1 + drafted_N
    first_N, known_N, left_N, lane = (
        torch.from_numpy(x).to(lanes.device)
        for x in (np.cumsum(count_N) - count_N, lanes.known_B[lane_N], drafted_N, lane_N)
    )
    if not drafted_N.any():
        lanes.tokens_BL[lane, known_N] = ids_F
        lanes.logprobs_BL[lane, known_N] = logprobs_F.float()
        state_N, code_N = stops.advance(lanes.state_B[lane], ids_F)
        lanes.state_B[lane] = state_N
        if reads_rows(lanes.device):
            drawn = send_drawn(ids_F, logprobs_F, code_N, torch.ones_like(code_N)).read()
            return drawn.code_N, drawn.taken_N
        return code_N.cpu().numpy(), np.ones_like(lane_N)
    state_N, alive_N = lanes.state_B[lane], torch.ones_like(left_N, dtype=torch.bool)
    code_N, taken_N = torch.zeros_like(left_N), torch.zeros_like(left_N)
    for column in range(int(count_N.max())):
        # A sequence with fewer drafts looks at its last row again, and changes nothing.
        row_N = first_N + left_N.clamp(max=column)
        place_N = known_N + left_N.clamp(max=column)
        ids_N, draft_N = ids_F[row_N], lanes.tokens_BL[lane, place_N]
        lanes.tokens_BL[lane, place_N] = torch.where(alive_N, ids_N, draft_N)
        kept_N = lanes.logprobs_BL[lane, place_N]
        lanes.logprobs_BL[lane, place_N] = torch.where(alive_N, logprobs_F[row_N].float(), kept_N)
        next_N, found_N = stops.advance(state_N, ids_N)
        state_N, code_N = torch.where(alive_N, next_N, state_N), torch.where(alive_N, found_N, code_N)
        taken_N += alive_N
        alive_N = alive_N & (left_N > column) & (ids_N == draft_N) & (code_N == 0)
    lanes.state_B[lane] = state_N
    if reads_rows(lanes.device):
        last_N = first_N + taken_N - 1
        drawn = send_drawn(ids_F[last_N], logprobs_F[last_N], code_N, taken_N).read()
        return drawn.code_N, drawn.taken_N
    codes, taken = torch.stack([code_N, taken_N]).cpu().numpy()
    return codes, taken


def rows_of(lanes: Lanes, lane_N: Ints, drafted_N: Ints) -> tuple[torch.Tensor, torch.Tensor]:
    """(lane, position that is drawn) of every row [F], int64."""
    count_N = 1 + drafted_N
    position_F = np.repeat(lanes.known_B[lane_N], count_N) + places(count_N)
    lane_F, positions = (torch.from_numpy(x).to(lanes.device) for x in (np.repeat(lane_N, count_N), position_F))
    return lane_F, positions
