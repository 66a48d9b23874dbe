"""Tests of a process's settings before torch is loaded: how threads wait, and that freed memory is kept."""

import os
import subprocess
import sys

import pytest

from thresher.cli.process import settings
from thresher.common.machine import KEEP_MEMORY, set_malloc

FAULTS = """
import os, resource, sys
from thresher.cli.process import prepare_process
if sys.argv[1] == "prepared":
    prepare_process()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
bytearray(48 << 20)
before = faults()
for _ in range(4):
    bytearray(48 << 20)
print(faults() - before)
"""


def played(code: str, *arguments: str, **environment: str) -> str:
    removed = ("OMP_", "GOMP_", "MALLOC_", "GLIBC_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(removed)}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=kept | {"PYTHONSAFEPATH": "1"} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_what_is_set_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = settings({})
    assert ours.keys() == {"GOMP_SPINCOUNT", "OPENBLAS_THREAD_TIMEOUT", "PYTORCH_ALLOC_CONF"}
    for added, names in {
        "GOMP_SPINCOUNT": ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"),
        "OPENBLAS_THREAD_TIMEOUT": ("OPENBLAS_THREAD_TIMEOUT",),
        "PYTORCH_ALLOC_CONF": ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    }.items():
        for name in names:
            assert settings({name: "x"}) == {key: value for key, value in ours.items() if key != added}
    for name, value in {"MALLOC_MMAP_THRESHOLD_": "1000", "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1000"}.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert not set_malloc(*KEEP_MEMORY)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc is on Linux")
def test_large_blocks_are_not_mapped_anew() -> None:
    """48 MiB are 12,288 pages, each a page fault if the block is a separate mapping."""
    if not set_malloc(*KEEP_MEMORY):
        pytest.skip("the C library is not glibc, or refuses")
    assert int(played(FAULTS, "prepared")) < 1000
    assert int(played(FAULTS, "plain")) > 10 * 1000
    assert int(played(FAULTS, "prepared", MALLOC_ARENA_MAX="2")) > 10 * 1000, "the user's own settings stand"


def test_the_command_line_decides_before_torch_is_loaded() -> None:
    code = """
import os, sys
from thresher.cli import main
assert "torch" not in sys.modules and "numpy" not in sys.modules
names = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OPENBLAS_THREAD_TIMEOUT"
main.run_command = lambda arguments: print(*(os.environ.get(name) for name in names))
main.main([])
"""
    assert played(code) == "None 1000 4"
    assert played(code, OMP_WAIT_POLICY="active") == "active None 4"


@pytest.mark.parametrize(("ranks", "ended"), [("1", "begun done torn down"), ("2", "begun done")])
def test_one_of_several_ranks_ends_without_teardown(ranks: str, ended: str) -> None:
    code = """
import atexit, sys
from thresher.cli.process import leave
atexit.register(lambda: print(" torn down"))
print("begun", end=" ")
sys.stdout.write("done")
leave(0)
"""
    assert played(code, WORLD_SIZE=ranks) == ended


def test_an_exit_beside_a_search_that_nobody_waits_for_any_more_keeps_its_status() -> None:
    """Regression: a thread that returned from torch while Python finalised aborted the process, with status 134."""
    code = """
import sys, threading, torch
from thresher.cli.process import leave
from thresher.common.background import Background, still_busy
began, a = threading.Event(), torch.ones(3000, 3000)
def search():
    began.set()
    while True:
        a @ a
assert not still_busy()
with Background() as background:
    background.submit(search)
    began.wait(60)
assert still_busy()
leave(3)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=100).returncode == 3
