"""A paper's tables as commands: manifests, what has to be run for a table, and the table beside the printed one.
Imports: engine/assemble.py, engine/config, engine/console.py, engine/evaluation, engine/extraction,
engine/planning, engine/reporting, engine/scoring, engine/store, engine/synthetic, engine/systems, policy,
retrieval/questions.py, rewards.
"""
