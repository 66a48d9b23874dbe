"""Lives here: `thresher data ..`, one file an action that makes question sets and transcripts, or looks at them.
May come in: flags, a handler, printing.
"""

HELP = "make and check data"
PLACE = 100
METAVAR = "ACTION"
