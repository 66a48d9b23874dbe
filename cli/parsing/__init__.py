"""The parser of arguments: what `--help` looks like, and mistakes in one sentence.

Deliberately absent: flags. Those of one command stand in its file, shared ones in flags.py.
"""
