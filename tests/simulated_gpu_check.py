"""`thresher bench gpu-check` with small sizes, for the simulated device: `simulated_gpu_check.py RESULTS [PART ..]`.

It replaces gpu-check's `parts` with the same commands and tables, whose sizes are overridden by further arguments and
whose limits are wide.
Parts that compile Triton or run a CUDA program are left out, or say so in their row.
"""

import sys
from dataclasses import replace
from importlib.util import find_spec

from thresher.bench import gpu_check

LOSS = ("--hidden", "64", "--vocab", "500", "--tokens", "64", "--peers", "none")
SMALL = {
    "smoke": ("tiny", "cuda"),
    "tests": (*(("-n", "0") if find_spec("xdist") else ()), "-k", "test_the_fastest_is_stored"),
    "tuning": LOSS,
    "loss": LOSS,
    "attention": ("--model", "0.5B", "--trees", "1", "--group-size", "2", "--shared", "8", "--own", "4"),
    "decode": ("--model", "0.5B", "--batch", "8", "--own", "4", "--shared", "8", "--steps", "1"),
    "rollout": ("--shape", "demo", "--rounds", "1", "--peer", "none"),
    "step": ("--shape", "demo", "--steps", "1", "--peer", "none"),
    "racecheck": (),
}
PARTS = gpu_check.parts()


def main(results: str, *names: str) -> str | None:
    """Run the parts with these names, all by default; return the final message of `thresher bench gpu-check`."""
    assert {part.name for part in PARTS} == SMALL.keys()
    small = tuple(replace(part, command=(*part.command, *SMALL[part.name]), seconds=600.0) for part in PARTS)
    gpu_check.parts = lambda: small
    return gpu_check.failure(gpu_check.run_gpu_check(results, 3600.0, names or None))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
