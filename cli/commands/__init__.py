"""The commands of `thresher`: a file each for its flags, its handler and its printing; a folder is a group.

A file here is found by its name and listed nowhere; docs/add/command.md says what it must hold.
"""

METAVAR = "COMMAND"
EXAMPLE = "thresher demo --out runs/demo"
