"""`thresher data ..`: one file an action that makes questions and transcripts, or looks at them.
Imports: cli/flags.py, engine/console.py, engine/episode.py, engine/refiners, engine/synthetic, engine/training,
retrieval/data, retrieval/datasets, retrieval/questions.py, rewards.
"""

HELP = "make and check data"
PLACE = 100
EXAMPLE = "thresher data check train.jsonl"
METAVAR = "ACTION"
