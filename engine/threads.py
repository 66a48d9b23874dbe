"""Number of threads of a run: `run.threads` of its recipe, or the number that suits the model.

"auto" is one thread if the widest matrix of a layer has fewer than `SMALL` elements, else torch's own default
(OMP_NUM_THREADS, or the cores that the process may use). Half of a product of 128 x 96 by 96 x 192 takes a few
microseconds, less than waking a thread; if another process has the core, the thread that is done waits a time slice for
the other. One thread also gives a tiny model the same bits on every number of cores. Wider models gain: a rollout at
256 x 768 is 1.5 times as fast on two cores.

cli/process.py decides how threads wait for work, before torch is loaded.

Deliberately absent: FAISS's own pool, whose searches are batched, and whose results do not depend on its threads.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from thresher.policy.config import ModelConfig
from thresher.retrieval.encoders.transformer import BertConfig

SMALL = 2**16  # elements of a layer's widest matrix


def threads_for(setting: Literal["auto"] | int, config: ModelConfig | BertConfig) -> int:
    """Return the number of threads for a run of this model, at least 1."""
    if setting != "auto":
        return setting
    if config.hidden_size * config.intermediate_size < SMALL:
        return 1
    return torch.get_num_threads()


@contextmanager
def use_threads(threads: int) -> Iterator[None]:
    """Set torch's number of threads within the block, and restore it afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
