"""`thresher study ..`: one file a claim; the studies themselves are in bench/studies."""

HELP = "put a claim of the method to the test"
PLACE = 130
EXAMPLE = "thresher study kl"
METAVAR = "CLAIM"
