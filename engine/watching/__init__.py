"""A run looked at while it goes on: its page served live, and a view in the terminal.
Imports: engine/config, engine/console.py, engine/reporting, engine/store, retrieval/data, retrieval/serving, rewards.

Another way to look may come in; nothing that writes into a run folder.
"""
