"""`thresher bench ..`: one file a measurement; the measuring itself is done in bench/."""

HELP = "measure, beside peers"
PLACE = 120
EXAMPLE = "thresher bench step"
METAVAR = "WHAT"
