"""Count the binaries that the launchers would compile for batches of several lengths, as JSON: kernel -> number.

test_compiled_once.py runs this where kernels are compiled and not interpreted. Nothing is compiled: a stand-in for the
driver reports the GPU, and the launcher's own binder says which binary it would request.
"""

import json
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from thresher.kernels import (
    coefficients_triton,
    gate_triton,
    heads_triton,
    norm_triton,
    objective,
    rope_triton,
    sampling_triton,
)
from thresher.kernels import head_triton as backend
from thresher.kernels.attention import cascade_triton, forest_triton, prefill_triton
from thresher.kernels.attention.prefix import PrefixForest, prefix_attention
from thresher.kernels.attention.rows import DecodeRows, PrefillRows, SharedPrefix
from thresher.kernels.delta import layer_triton, steps_triton
from thresher.kernels.delta import rule_triton as delta_rule
from thresher.kernels.delta.layer import UNIT_EPS, DeltaInputs, Spans
from thresher.kernels.registry import specialisations_of, triton_modules

LENGTHS = (1, 2, 16, 63, 64, 1000)


class Driver:
    """The part of Triton's driver that the binder uses."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_stream(self, device: int) -> int:
        return 0


def count(kernel: Any, seen: set[str]) -> None:
    """Make the kernel record which binaries it would compile, instead of running."""

    def run(*arguments: Any, grid: Any = None, warmup: Any = None, **options: Any) -> None:
        _, specialisation, chosen = kernel.device_caches[0][-1](*arguments, **options)
        seen.add(f"{specialisation} {sorted(chosen.items())}")

    kernel.run = run


def loss(n: int) -> None:
    w, vector, targets = torch.randn(500, 20), torch.rand(n), torch.zeros(n, dtype=torch.int64)
    rows = objective.LossRows(targets, targets, vector, vector, vector, vector)
    for settings in (objective.LossSettings(beta=0.1), objective.LossSettings(beta=0.1, entropy_coef=0.1)):
        coefficients_triton.TritonLoss(w, settings, 1000).gradient(torch.randn(n, 20), rows)
    backend.TritonHead(w, 1.0, n).logprobs(torch.randn(n, 20), targets)


def layers(n: int) -> None:
    x = torch.ones(n, 896, dtype=torch.bfloat16, requires_grad=True)
    w = torch.ones(896, dtype=torch.bfloat16, requires_grad=True)
    torch.autograd.backward(norm_triton.fused_add_norm(x, x, w, 1e-6), (x.detach(), x.detach()))
    gate_triton.fused_silu_gate(x).backward(x.detach()[:, :448])
    heads = x.view(n, 14, 64)
    heads_triton.fused_norm_heads(heads, w[:64], w[:64], 2, 1e-6).backward(heads.detach())
    places = torch.zeros(3, n, dtype=torch.int32)
    caches = torch.ones(2, 5, 2, 16, 64)
    rope_triton.fused_rotate_and_store(torch.ones(n, 18, 64), torch.ones(2, n, 1, 32), 2, *caches, places[1], places[2])
    projection = torch.ones(n, 18, 64, requires_grad=True)
    turned = rope_triton.fused_rotated_heads(projection, torch.ones(2, n, 1, 32), 2)
    torch.autograd.backward(turned, [x.detach() for x in turned])


def draws(n: int) -> None:
    """Draw with more than 16 rows, at one temperature per row and at one for all."""
    n += 16
    many, head = torch.zeros(n + 1, dtype=torch.int64), torch.zeros(500, 64)
    for temperature in (torch.zeros(n + 1)[1:], torch.zeros(1).expand(n)):
        sampling_triton.draw_fused(torch.zeros(n, 64), head, many[1:], many[1:], temperature)


def attention(n: int) -> None:
    def ints(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.int32)

    n = min(n, 65)  # a group has as many members as there are groups
    cache = torch.zeros(2, 2, 64, 64, dtype=torch.bfloat16)
    prefix = SharedPrefix(ints(n, n + 1), ints(n), ints(n, n + 2))
    rows = DecodeRows(ints(n, n + 3), ints(n + 1)[1:], ints(n + 1)[1:], ints(n), prefix)
    cascade_triton.triton_decode(torch.zeros(n, 1, 14, 64, dtype=torch.bfloat16), cache, cache, rows, n % 4 + 9)
    runs = PrefillRows(ints(n, n + 3), ints(n + 1)[1:], ints(n), ints(n), n)
    prefill_triton.triton_prefill(torch.zeros(n, 14, 64, dtype=torch.bfloat16), cache, cache, runs)


def forest(n: int) -> None:
    """Attend over two segments below a third."""
    layout = PrefixForest([n, 3, n], [-1, 0, 0], attention=forest_triton.TritonForest())
    q, k, v = (torch.ones(2 * n + 3, heads, 64, dtype=torch.bfloat16, requires_grad=True) for heads in (14, 2, 2))
    out = prefix_attention(q, k, v, layout)
    out.backward(out.detach())


def delta(n: int) -> None:
    """Run a segment and another that continues it, read from wider rows."""
    wide, conv = (torch.ones(*x, dtype=torch.bfloat16, requires_grad=True) for x in ((n + 3, 256), (192, 4)))
    spans = Spans([n, 1, 2], [-1, 0, 0], torch.device("cpu"))
    readers = partial(spans.readers, 4)
    found = layer_triton.fused_heads(wide[:, :192], conv, spans.before_T, readers, (2, 2), 32, UNIT_EPS)
    torch.autograd.backward(found, [x.detach() for x in found])
    o, w = found[2].detach().requires_grad_(), torch.ones(32, requires_grad=True)
    layer_triton.fused_gated_norm(o, wide[:, 192:].unflatten(1, (2, 32)), w, 1e-6).backward(found[2].detach())
    q, k, v = torch.ones(n + 3, 3, 2, 32, dtype=torch.bfloat16).unbind(1)
    gates = torch.zeros(2, n + 3, 2)
    lists = delta_rule.make_lists([0, n, n + 3], [-1, 0], 64, torch.device("cpu"))
    delta_rule.backward(q, k, v, *gates, None, v, gates, lists)
    delta_rule.forward(q, k, v, *gates, None, lists)
    place_N, mixed = torch.zeros(n, dtype=torch.int64), torch.ones(n, 192, dtype=torch.bfloat16)
    inputs = DeltaInputs(mixed, torch.ones(192, 4, dtype=torch.bfloat16), torch.ones(n, 2), torch.ones(n, 2), 2, 32)
    steps_triton.fused_next(inputs, torch.ones(3, 2, 2, 32, 32), mixed[:1].view(1, 1, 192), *3 * [place_N], 1)


LAUNCHES: tuple[Callable[[int], None], ...] = (loss, layers, draws, attention, forest, delta)


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    seen: defaultdict[str, set[str]] = defaultdict(set)
    for module in triton_modules():
        for entry in specialisations_of(module):
            count(entry.kernel, seen[entry.kernel.fn.__name__])
    for launches in LAUNCHES:
        for n in LENGTHS:
            launches(n)
    print(json.dumps({kernel: len(binaries) for kernel, binaries in seen.items()}))


if __name__ == "__main__":
    main()
