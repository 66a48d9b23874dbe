"""`thresher bench compile`: every Triton kernel there is, compiled for GPUs that need not be there, and checked.

run.py         the command: the table, the rows, and the same under another Triton
compiler.py    kernels for targets: Triton's compiler, the assembler's log, and what is a fault
sass.py        the machine code: prologue, loops, epilogue, widths, spills; elf.py: several cubins as one
predict.py     bytes in flight beside Little's law, and a predicted share of peak
target.py      sm_80 and sm_90, and how many blocks a multiprocessor holds
"""

from thresher.bench.compile.run import KERNEL_MODULES, run_compile_bench, run_under
from thresher.bench.compile.target import TARGETS

__all__ = ["KERNEL_MODULES", "TARGETS", "run_compile_bench", "run_under"]
