"""`thresher index ..`: one file an action on index folders.
Imports: cli/flags.py, engine/config, engine/console.py, policy, retrieval/building, retrieval/encoders,
retrieval/indexes.
"""

HELP = "plan, build, join, search or check an index"
PLACE = 80
METAVAR = "ACTION"
