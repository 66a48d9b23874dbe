"""A pytest plugin for tests on a GPU: `pytest -p thresher.bench.gpu_tests`, as `thresher bench gpu-check` runs them.

A kernel's illegal access shows at the next synchronisation and ends all further CUDA work of its process. Each test
therefore synchronises before it ends, so that the error is reported for the test that caused it. After such a test, or
one that takes longer than `HANGS` seconds, the process ends; pytest-xdist starts another one, which continues with the
next test. Each failure is printed at once, in a line that begins with FAILED.
"""

import faulthandler
import os
import sys
import threading
from collections.abc import Iterator

import pytest

HANGS = 60.0  # seconds, including compilation
WORKER = "PYTEST_XDIST_WORKER" in os.environ
STDERR = os.dup(2)  # before pytest captures it


def synchronize() -> None:
    """Wait for the GPU, if this process has used it. Raises CUDA's error."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def end_process(test: str, why: str) -> None:
    """End this process at once; without pytest-xdist that ends the test run."""
    os.write(STDERR, f"\nFAILED {test}: {why}\n".encode())
    faulthandler.dump_traceback(STDERR)
    os._exit(3)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    timer = threading.Timer(HANGS, end_process, (item.nodeid, f"took more than {HANGS:.0f} s"))
    timer.daemon = True
    timer.start()
    try:
        return (yield)
    finally:
        timer.cancel()
        try:
            synchronize()
        except Exception as error:  # whatever torch raises for CUDA's error
            end_process(item.nodeid, f"CUDA fails from here on: {str(error).splitlines()[0]}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    found = yield
    synchronize()
    return found


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and not WORKER:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = str(report.longrepr) if crash is None else crash.message
        line = " ".join((reason.strip() or "no message").splitlines()[0].split())
        print(f"\nFAILED {report.nodeid}: {line[:200]}", flush=True)
