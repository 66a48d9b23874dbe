"""Files that survive a kill: run folders and checkpoints.

Another thing kept on disk, whole or not at all, may come in; nothing that computes it.
"""
