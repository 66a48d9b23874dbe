"""A run looked at while it goes on: its page served live, and a view in the terminal.

Another way to look may come in; nothing that writes into a run folder.
"""
