"""`thresher study ..`: one file a claim; the studies themselves are in bench/studies.
Imports: bench/studies/kl, bench/studies/mask, bench/studies/systems, cli/flags.py, engine/console.py,
engine/interrupt.py, policy.
"""

HELP = "put a claim of the method to the test"
PLACE = 130
EXAMPLE = "thresher study kl"
METAVAR = "CLAIM"
