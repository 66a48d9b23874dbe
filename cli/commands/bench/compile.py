"""`thresher bench compile`: registers, spills, widths and bytes in flight of every kernel, by bench/compile.py.

Status 1 where a kernel does not compile or not into what it should.
"""

import argparse
import sys

HELP = "the Triton kernels, compiled for GPUs that are not here"
PLACE = 40
EXAMPLE = "thresher bench compile --target sm_90"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", action="append", choices=("sm_80", "sm_90"), help="default: both")
    parser.add_argument("--module", action="append", help="dotted name of one with kernels, in place of the loss's")
    parser.add_argument(
        "--triton", metavar="DIR", help="another Triton, its wheel unpacked there, in place of this one"
    )
    parser.add_argument("--out", help="JSON lines to append to")


def run(options: argparse.Namespace) -> None:
    from thresher.bench.compile import KERNEL_MODULES, TARGETS, run_compile_bench, run_under

    targets, modules = options.target or tuple(TARGETS), options.module or KERNEL_MODULES
    if options.triton is not None:
        sys.exit(run_under(options.triton, targets, modules, options.out, options.json))
    wrong = run_compile_bench(targets, modules, options.out)
    if wrong is not None:
        sys.exit(wrong)  # status 1
