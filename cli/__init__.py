"""Lives here: the command line. main.py runs a command, registry.py finds all of them, flags.py has what they share.
May come in: reading arguments, and printing; work belongs to the packages that a command calls.
"""
