"""The commands of `thresher`: a file each for its flags, its handler and its printing; a folder is a group.
Imports: bench/rollout, cli/flags.py, engine/assemble.py, engine/baselines, engine/config, engine/console.py,
engine/decoding, engine/episode.py, engine/evaluation, engine/extraction, engine/interrupt.py, engine/machine.py,
engine/parallel, engine/planning, engine/protocol, engine/refiners, engine/reporting, engine/reproduction,
engine/scoring, engine/store, engine/synthetic, engine/systems, engine/training, engine/watching, policy,
retrieval/indexes, retrieval/serving, rewards.

A file here is found by its name and listed nowhere; docs/add/command.md says what it must hold.
"""

METAVAR = "COMMAND"
EXAMPLE = "thresher demo --out runs/demo"
