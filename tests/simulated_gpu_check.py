"""`thresher bench gpu-check` with small sizes, for the simulated device: `simulated_gpu_check.py RESULTS [PART ..]`.

The parts, their commands and tables are gpu-check's own, in the place of whose `parts` it puts them; arguments behind a
command's own override its sizes, and limits are wide.
What compiles Triton or runs a program of CUDA is left out, or says so in its row.
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
    """Run the parts of these names, all for none; return what `thresher bench gpu-check` would end with."""
    assert {part.name for part in PARTS} == SMALL.keys()
    small = tuple(replace(part, command=(*part.command, *SMALL[part.name]), seconds=600.0) for part in PARTS)
    gpu_check.parts = lambda: small
    return gpu_check.failure(gpu_check.run_gpu_check(results, 3600.0, names or None))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
