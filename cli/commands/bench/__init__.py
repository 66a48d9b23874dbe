"""Lives here: `thresher bench ..`, one file a measurement; the measuring is the package bench's.
May come in: flags, a handler, printing.
"""

HELP = "measure, beside peers"
PLACE = 120
METAVAR = "WHAT"
