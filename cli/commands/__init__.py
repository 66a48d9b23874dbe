"""Lives here: the commands of `thresher`, one file each, found by their file's name; a folder is a group of commands.
May come in: one command's flags, its handler and what it prints (docs/add/command.md says what a file must hold).
"""

METAVAR = "COMMAND"
