"""Lives here: `thresher study ..`, one file a claim; the studies are in bench/studies.
May come in: flags, a handler, printing.
"""

HELP = "put a claim of the method to the test"
PLACE = 130
METAVAR = "CLAIM"
