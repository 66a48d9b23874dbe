"""Several cubins as one: a kernel's code reads as it does by itself, and the file is one that others can read."""

from pathlib import Path
from typing import Any

import pytest
from compiling import said

pytest.importorskip("triton")

from thresher.bench.compile.elf import merged

pytestmark = pytest.mark.slow

READ = """
import contextlib, io, json, subprocess, sys, tempfile
from triton import knobs
from thresher.bench.compile import compiler, elf, sass
from thresher.bench.compile.target import TARGETS
from thresher.kernels.registry import specialisations_of

chosen = [one for one in specialisations_of("toy_kernels") if one.name in ("sound", "sound product", "spilling")]
pairs = [(one, TARGETS[name]) for name in ("sm_80", "sm_90") for one in chosen]
kept = []
whole = sass.disassemble

def keep(cubins, folder):
    kept.extend(cubins)
    return whole(cubins, folder)

compiler.disassemble = keep
with contextlib.redirect_stdout(io.StringIO()):
    together = [str(result.code) for result in compiler.compile_all(pairs)]

def alone(cubin):  # as the disassembler reads the file that ptxas wrote
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        return str(sass.read_code(subprocess.run(command, capture_output=True, text=True, check=True).stdout))

try:
    elf.merged(kept)
    refused = ""
except ValueError as error:
    refused = str(error)
first = [one for one in elf.sections(kept[0]) if one.name.startswith(elf.CODE)]
again = [one for one in elf.sections(elf.merged(kept[:2])) if one.name.startswith(elf.CODE)]
print(json.dumps({
    "together": together,
    "alone": [alone(cubin) for cubin in kept],
    "refused": refused,
    "names": [one.name for one in again],
    "same": again[0].data == first[0].data,
}))
"""


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return said(("-c", READ), tmp_path_factory.mktemp("cache"), Path(__file__).parent)


def test_code_reads_as_it_does_by_itself(read: Any) -> None:
    """Products in loops, spills, and neither; each with its own number of instructions."""
    assert read["together"] == read["alone"]
    assert len(read["alone"]) == 6 == len(set(read["alone"]))


def test_each_cubins_code_has_its_number(read: Any) -> None:
    assert read["names"] == [".text.0.double", ".text.1.multiply"] and read["same"]


def test_code_for_two_gpus_does_not_go_into_one_file(read: Any) -> None:
    assert read["refused"] == "expected cubins for one GPU"
    with pytest.raises(ValueError, match="expected cubins for one GPU"):
        merged([])
