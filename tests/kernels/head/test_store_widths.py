"""At the trainer's 151,665 columns exponentials leave in vectors of 16 bytes: compiled, and the PTX read."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

COMPILE = """
import json, re, sys
from collections import Counter
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from thresher.kernels.launch.registry import specialisations_of

found = {}
for module in ("coefficients_triton", "head.head_triton", "head.persistent_triton"):
    for entry in specialisations_of(f"thresher.kernels.{module}"):
        kernel, constants = entry.kernel, entry.constants
        wide = constants.get("V") == 151_665 and constants["H"] == 1536 or "STORED" in constants
        if not wide or entry.signature["exps_ptr"] != "*bf16":
            continue
        for capability in entry.capabilities:
            source = ASTSource(
                kernel,
                {name: "constexpr" if name in constants else entry.signature[name] for name in kernel.arg_names},
                constants,
                {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in entry.aligned},
            )
            options = {"num_warps": entry.num_warps, "num_stages": entry.num_stages}
            ptx = compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
            # vectors as ".v4.b32", numbers as ".b32" and ".b16"
            counts = Counter(re.findall(r"st\\.global((?:\\.v\\d)?\\.\\w+) ", ptx))
            found[f"{kernel.fn.__name__} sm_{capability}"] = counts
print(json.dumps(found))
"""


def test_exponentials_are_stored_in_whole_vectors() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMPILE], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    kernels = ("_head_kernel", "_again_kernel", "_entropy_kernel")
    names = {f"{kernel} {target}" for kernel in kernels for target in ("sm_80", "sm_90")}
    assert found.keys() == names | {"_persistent_head_kernel sm_90"}
    for name, widths in found.items():
        assert not [width for width in widths if width.endswith("16")], (name, widths)
        assert widths.pop(".v4.b32") >= 4, name
        # m, s and u of a row, y of each half of a tile
        assert sum(widths.values()) <= (0 if "again" in name or "entropy" in name else 5), (name, widths)
