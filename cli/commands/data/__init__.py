"""`thresher data ..`: one file an action that makes questions and transcripts, or looks at them."""

HELP = "make and check data"
PLACE = 100
EXAMPLE = "thresher data check train.jsonl"
METAVAR = "ACTION"
