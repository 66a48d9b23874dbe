"""Indexes on all GPUs of a machine, in float16, every GPU with a share of the vectors.

What they find is scored again from the kept file like any candidates, so rounding to float16 can cost a hit at the edge
but never shows in a score. A GPU's sums may round differently in another batch: here, a query's result may depend on
the batch it is in. No machine at hand has had FAISS for GPUs: the division into shards is tested on the CPU, and the
rest is not.

Deliberately absent: graphs, which FAISS has no GPU form for, and building on GPUs.
"""

from typing import Any

from thresher.common.errors import UserError
from thresher.retrieval.encoders.encoder import Vectors
from thresher.retrieval.vectors.approximate import Candidates
from thresher.retrieval.vectors.exact import Rows, best_of
from thresher.retrieval.vectors.faiss_library import faiss
from thresher.retrieval.vectors.file import VectorFile
from thresher.retrieval.vectors.structure import inner

# Candidates fetched per hit from a flat index in float16, whose order near the k-th place is not quite the exact one.
FLAT_FACTOR = 2


def check_gpus() -> int:
    """How many GPUs FAISS sees; UserError if none."""
    count = faiss.get_num_gpus() if hasattr(faiss, "StandardGpuResources") else 0
    if count < 1:
        raise UserError("this FAISS sees no GPU; install thresher with its extra [gpu] where there is one")
    return int(count)


class GpuLists(Candidates):
    """The lists of a FAISS IVF index, with or without a rotation."""

    parameter = "nprobe"

    def __init__(self, index: Any) -> None:
        check_gpus()
        self.most = int(inner(index).nlist)
        options = faiss.GpuMultipleClonerOptions()
        options.shard = True
        options.useFloat16 = True
        self._index = faiss.index_cpu_to_all_gpus(index, options)
        self._space = faiss.GpuParameterSpace()

    def find(self, query_QD: Vectors, fetch: int, value: int) -> tuple[Vectors, Rows]:
        """As Candidates has it."""
        self._space.set_index_parameter(self._index, "nprobe", min(value, self.most))
        score_QF, row_QF = self._index.search(query_QD, fetch)
        return score_QF, row_QF


class FlatShards(Candidates):
    """Runs of the rows of `vectors`, one in each of the empty FAISS flat indexes `shards`. It has no search parameter:
    every search is one pass."""

    parameter = "passes"
    most = 1

    def __init__(self, vectors: VectorFile, shards: list[Any]) -> None:
        borders = [vectors.rows * number // len(shards) for number in range(len(shards) + 1)]
        self._shards = list(zip(borders, shards, strict=False))
        for start, stop, shard in zip(borders, borders[1:], shards, strict=False):
            for _, part_BD in vectors.slices(start, stop):
                shard.add(part_BD.astype("float32", copy=False))

    def find(self, query_QD: Vectors, fetch: int, value: int) -> tuple[Vectors, Rows]:
        """As Candidates has it."""
        found = []
        for start, shard in self._shards:
            score_QF, row_QF = shard.search(query_QD, min(fetch, shard.ntotal))
            found.append((score_QF, start + row_QF))
        return best_of(found, fetch)


def flat_on_gpus(vectors: VectorFile) -> FlatShards:
    """`vectors` in float16 on all GPUs."""
    shards = []
    for device in range(check_gpus()):
        config = faiss.GpuIndexFlatConfig()
        config.device, config.useFloat16 = device, True
        # Kept by the index itself, which FAISS's Python layer sees to.
        shards.append(faiss.GpuIndexFlatIP(faiss.StandardGpuResources(), vectors.dim, config))
    return FlatShards(vectors, shards)
