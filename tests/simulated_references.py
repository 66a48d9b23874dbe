"""Plain torch in place of Triton's kernels, which take the interpreter minutes. The rest of a GPU's path stays."""

import pytest
import simcuda

from thresher.engine.decoding import decoder_cuda, kv_cache
from thresher.engine.training import update
from thresher.kernels import layers, operands, sampling
from thresher.kernels.attention import paged_cuda
from thresher.kernels.attention.backends import parts
from thresher.kernels.attention.parts import MatmulAttention


def without_kernels(patch: pytest.MonkeyPatch) -> None:
    for module in (sampling, operands, parts):
        patch.setattr(module, "find_spec", lambda name: None)
    patch.setattr(layers, "_has_triton", lambda: False)
    patch.setattr(paged_cuda, "_runs_triton", lambda q: False)
    patch.setattr(update, "load_forest_attention", lambda *_: MatmulAttention())
    # A kernel skips rows that pad a bucket; the reference computes them.
    patch.setattr(decoder_cuda, "PREFILL_ROWS", (32, 128))
    patch.setattr(decoder_cuda, "PREFILL_RUNS", 4)
    store = simcuda.one_launch(layers.rotate_and_store)  # the reference reads which rows to store
    for module in (decoder_cuda, kv_cache):
        patch.setattr(module, "rotate_and_store", store)
