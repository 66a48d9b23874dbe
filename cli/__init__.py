"""The command line: main.py runs a command, registry.py finds all of them, flags.py has what their flags share.

Deliberately absent: work. Whatever is not reading arguments, or printing, lies in the rooms that come in.
"""
