"""The command line: the parser, what several commands' flags share, and how a mistake ends.
Comes in: bench/compile.py, bench/loss, bench/retrieval, bench/step, cli/commands, engine/assemble.py, engine/config,
engine/console.py, engine/evaluation, engine/reporting, engine/scoring, engine/synthetic, engine/training, rewards.
"""
