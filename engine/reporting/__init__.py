"""From a run folder to a page, plots and excerpts that people read.
Imports: engine/config, engine/console.py, engine/evaluation, engine/store, engine/systems, policy,
retrieval/indexes, rewards.

Another view of stored records may come in; nothing that a run depends on.
"""
