"""`thresher bench ..`: one file a measurement; the measuring itself is done in bench/.
Imports: bench/compile, bench/decode, bench/gpu_check, bench/loss, bench/retrieval, bench/rollout, bench/roofline,
bench/step, bench/torture, cli/flags.py, engine/console.py.
"""

HELP = "measure, beside peers"
PLACE = 120
EXAMPLE = "thresher bench step"
METAVAR = "WHAT"
