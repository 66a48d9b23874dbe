"""Lives here: `thresher index ..`, one file an action on index folders.
May come in: flags, a handler, printing.
"""

HELP = "plan, build, join, search or check an index"
PLACE = 80
METAVAR = "ACTION"
