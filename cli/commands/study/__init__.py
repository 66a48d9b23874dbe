"""`thresher study ..`: one file a claim; the studies themselves are in bench/studies.
Comes in: bench/studies, cli/flags.py.
"""

HELP = "put a claim of the method to the test"
PLACE = 130
METAVAR = "CLAIM"
