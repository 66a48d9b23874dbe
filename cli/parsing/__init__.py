"""The parser of arguments: what `--help` looks like, and mistakes in one sentence.
Imports: engine/console.py, rewards.

Deliberately absent: flags. Those of one command stand in its file, shared ones in flags.py.
"""
