"""How long a call takes: the clock of both calibrations.

Deliberately absent: what is timed (`calibrate`, `calibrate_words`).
"""

import time
from collections.abc import Callable

# Hits that a timed search is asked for.
K = 10
REPEATS = 2


def timed(call: Callable[[], object]) -> float:
    """Seconds that `call` takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def best_time(call: Callable[[], object]) -> float:
    """Seconds of the fastest of a few calls, after one that is not counted."""
    call()
    return min(timed(call) for _ in range(REPEATS))
