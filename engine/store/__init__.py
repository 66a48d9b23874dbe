"""Files that survive a kill: run folders and checkpoints.

Other files that are written completely or not at all belong here; code that computes their content does not.
"""
