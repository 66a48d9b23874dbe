"""The rows of largest float32 inner product: a matmul for each block of rows, with a running top.

A block's best are found while its scores are in the caches: rows form groups of GROUP, and the `fetch` groups with the
highest maximum contain `fetch` rows that no others exceed. A query is updated only if a block's maximum exceeds the
lowest of its current top. The scores' last bits depend on the batch; the answer that `exact` derives from them does
not. NaN is skipped.

Shape letters: N rows, Q queries, D dimension, F fetched candidates, B rows of a block, M groups, G rows of a group, H
queries that a block updates, C candidates: the current top and the best groups' rows.
"""

import warnings

import numpy as np
import numpy.typing as npt
import torch

from thresher.retrieval.encoders import Vectors
from thresher.retrieval.indexes.vector_file import Array

# Scores in memory at a time: 32 MB.
SCORES = 1 << 23
# Rows of a group: the maxima and the rows of the best groups are about equally many in a block of 8,192.
GROUP = 16
# With fewer queries, a product is bound by memory, the BLAS is faster with the queries as its rows, and the best are
# found without groups.
FEW = 8


class RunningTop:
    """The best `fetch` of the rows passed to `add`, for each query of `query_QD`, float32."""

    def __init__(self, query_QD: Vectors, fetch: int) -> None:
        self._query_QD = torch.from_numpy(np.ascontiguousarray(query_QD))
        self._fetch = fetch
        self._score_QF = torch.full((len(query_QD), fetch), -torch.inf)
        self._row_QF = torch.full((len(query_QD), fetch), -1)
        self._step = max(GROUP, SCORES // len(query_QD) // GROUP * GROUP)

    def add(self, start: int, block_BD: Array) -> None:
        """Scan the rows `block_BD`, float32 or float16, of which the first is row `start`."""
        with warnings.catch_warnings():
            # The file is mapped read-only, and the rows are only read.
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            rows_BD = torch.from_numpy(block_BD)
        step = -(-len(rows_BD) // -(-len(rows_BD) // self._step))  # even parts
        for first in range(0, len(rows_BD), step):
            part_BD = rows_BD[first : first + step].float()
            if len(self._query_QD) < FEW:
                self._keep_few(start + first, part_BD)
            else:
                self._keep(start + first, start + first + len(part_BD), self._scores(part_BD))

    def found(self) -> tuple[Vectors, npt.NDArray[np.int64]]:
        """Return scores and rows, [Q, F], best first, padded with -inf and row -1 if fewer were added."""
        self._row_QF[self._score_QF == -torch.inf] = -1
        return self._score_QF.numpy(), self._row_QF.numpy()

    def _scores(self, rows_BD: torch.Tensor) -> torch.Tensor:
        """Return scores, [G, M, Q], with row g * M + m of the block at (g, m), padded with -inf."""
        rows, queries = len(rows_BD), len(self._query_QD)
        groups = -(-rows // GROUP)
        score_BQ = torch.empty(groups * GROUP, queries)
        score_BQ[rows:] = -torch.inf
        torch.mm(rows_BD, self._query_QD.T, out=score_BQ[:rows])
        return score_BQ.view(GROUP, groups, queries)

    def _keep_few(self, start: int, rows_BD: torch.Tensor) -> None:
        score_QB = self._query_QD @ rows_BD.T
        score_QF, row_QF = score_QB.topk(min(self._fetch, len(rows_BD)))
        if score_QF[:, 0].isnan().any():
            score_QF, row_QF = score_QB.nan_to_num(-torch.inf, torch.inf, -torch.inf).topk(score_QF.shape[1])
        score_QC = torch.cat([self._score_QF, score_QF], 1)
        self._score_QF, chosen_QF = score_QC.topk(self._fetch)
        self._row_QF = torch.cat([self._row_QF, row_QF + start], 1).gather(1, chosen_QF)

    def _keep(self, start: int, stop: int, score_GMQ: torch.Tensor) -> None:
        best_MQ = score_GMQ.amax(0)
        best_Q = best_MQ.amax(0)
        if best_Q.isnan().any():
            return self._keep(start, stop, score_GMQ.nan_to_num(-torch.inf, torch.inf, -torch.inf))
        query_H = (best_Q > self._score_QF[:, -1]).nonzero()[:, 0]
        if not len(query_H):
            return
        had, groups = self._fetch, len(best_MQ)
        group_HF = best_MQ.T[query_H].topk(min(self._fetch, groups), sorted=False).indices
        score_HFG = score_GMQ.permute(1, 2, 0)[group_HF, query_H[:, None]]
        score_HC = torch.cat([self._score_QF[query_H], score_HFG.flatten(1)], 1)
        self._score_QF[query_H], chosen_HF = score_HC.topk(self._fetch)
        new_HF = (chosen_HF - had).clamp(min=0)
        row_HF = start + group_HF.gather(1, new_HF // GROUP) + groups * (new_HF % GROUP)
        row_HF[row_HF >= stop] = -1
        had_HF = self._row_QF[query_H].gather(1, chosen_HF.clamp(max=had - 1))
        self._row_QF[query_H] = torch.where(chosen_HF < had, had_HF, row_HF)
