"""Pages, pictures and a live view of runs, from the records in their folders.

Another view of stored records may come in; nothing that a run depends on or that writes into a run folder.
"""
