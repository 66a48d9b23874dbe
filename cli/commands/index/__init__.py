"""`thresher index ..`: one file an action on index folders.
Imports: cli/flags.py, engine/config, engine/console.py, engine/interrupt.py, engine/machine.py, policy,
retrieval/building, retrieval/encoders, retrieval/indexes, rewards.
"""

HELP = "plan, build, join, search or check an index"
PLACE = 80
EXAMPLE = "thresher index build --corpus corpus.jsonl --out indexes/mine"
METAVAR = "ACTION"
