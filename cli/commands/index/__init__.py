"""`thresher index ..`: one file an action on index folders."""

HELP = "plan, build, join, search or check an index"
PLACE = 80
EXAMPLE = "thresher index build --corpus corpus.jsonl --out indexes/mine"
METAVAR = "ACTION"
