"""The command line: main.py runs a command, parser.py makes flags of its fields, flags.py has what commands share.

Deliberately absent: work. Whatever is not reading arguments, or printing, lies in the packages below.
"""
