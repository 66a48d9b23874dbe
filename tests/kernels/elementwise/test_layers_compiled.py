"""What Triton compiles of a layer's kernels, without a GPU: once for all lengths, and in accesses of 16 bytes.

In processes of their own, since here kernels may be interpreted ones.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

LENGTHS = """
import json, torch, triton
from triton.backends.compiler import GPUTarget
from thresher.kernels.elementwise import gate_triton, heads_triton, norm_triton, rope_triton

class Driver:  # enough of one to ask the launcher what it would compile, without a GPU
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_active_torch_device(self): return torch.device("cpu")
    def get_current_stream(self, device): return 0

triton.runtime.driver.set_active(Driver())
seen = {}
def count(kernel):
    def run(*arguments, grid=None, warmup=None, **options):
        binder = kernel.device_caches[0][-1]
        bound, specialisation, chosen = binder(*arguments, **options)
        seen.setdefault(kernel.fn.__name__, set()).add(str(specialisation) + str(sorted(chosen.items())))
    kernel.run = run
for module in (gate_triton, heads_triton, norm_triton, rope_triton):
    for entry in module.specialisations():
        count(entry.kernel)
w = torch.ones(896, dtype=torch.bfloat16, requires_grad=True)
for T in (1, 2, 16, 63, 1000):
    x = torch.ones(T, 896, dtype=torch.bfloat16, requires_grad=True)
    torch.autograd.backward(norm_triton.fused_add_norm(x, x, w, 1e-6), (x.detach(), x.detach()))
    gate_triton.fused_silu_gate(x).backward(x.detach()[:, :448])
    heads = x.view(T, 14, 64)
    heads_triton.fused_norm_heads(heads, w[:64], w[:64], 2, 1e-6).backward(heads.detach())
    qkv, rope = torch.ones(T, 18, 64), torch.ones(2, T, 1, 32)
    caches = torch.ones(2, 5, 2, 16, 64)
    places = torch.zeros(3, T, dtype=torch.int32)
    rope_triton.fused_rotate_and_store(qkv, rope, 2, *caches, places[1], places[2])
print(json.dumps({name: len(kinds) for name, kinds in seen.items()}))
"""

ACCESSES = """
import json, re
from collections import Counter
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from thresher.kernels.elementwise import gate_triton, heads_triton, norm_triton, rope_triton

CUDABackend.make_cubin = lambda *_: b""  # PTX is all that is looked at
found = {}
for module in (gate_triton, heads_triton, norm_triton, rope_triton):
    for entry in module.specialisations():
        kernel, constants = entry.kernel, entry.constants
        types = {name: "constexpr" if name in constants else entry.signature[name] for name in kernel.arg_names}
        aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in entry.aligned}
        ptx = compile(
            ASTSource(kernel, types, constants, aligned),
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": entry.num_warps, "num_stages": entry.num_stages},
        ).asm["ptx"]
        bytes_of = []
        for access, count, bits in re.findall(r"(ld|st)\\.global\\S*?(?:\\.v([248]))?\\.[bfsu](8|16|32|64)\\b", ptx):
            bytes_of.append(access + str(int(count or 1) * int(bits) // 8))
        found[f"{kernel.fn.__name__} {entry.name}"] = Counter(bytes_of)
print(json.dumps(found))
"""

# Beside vectors: the block and slot of a row, an element of dw, and a program's part of it, written once.
SINGLE = {
    "_rotate_and_store_kernel": {"ld4": 2},
    "_sum_parts_kernel": {"st2": 1},
    "_norm_heads_backward_kernel": {"st4": 2},
}


def said(script: str, cache: Path) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_five_lengths_share_one_specialisation(tmp_path: Path) -> None:
    assert said(LENGTHS, tmp_path) == {
        "_add_norm_kernel": 1,
        "_add_norm_backward_kernel": 1,
        "_sum_parts_kernel": 2,  # its two users' widths
        "_norm_heads_kernel": 1,
        "_norm_heads_backward_kernel": 1,
        "_silu_gate_kernel": 1,
        "_silu_gate_backward_kernel": 1,
        "_rotate_and_store_kernel": 1,
    }


def test_loads_and_stores_are_of_16_bytes(tmp_path: Path) -> None:
    found = said(ACCESSES, tmp_path)
    assert len(found) > 20
    for name, accesses in found.items():
        vectors = {access: accesses.pop(access, 0) for access in ("ld16", "st16")}
        kernel = name.partition(" ")[0]
        assert accesses == ({} if name.endswith("no dw") else SINGLE.get(kernel, {})), name
        assert vectors["ld16"] > 0 and (vectors["st16"] > 0 or kernel == "_sum_parts_kernel"), name
