"""`thresher study ..`: one file a claim; the studies themselves are in bench/studies.
Imports: bench/studies/kl, bench/studies/mask, bench/studies/systems, cli/flags.py.
"""

HELP = "put a claim of the method to the test"
PLACE = 130
METAVAR = "CLAIM"
