"""From a run folder to a page, plots and excerpts that people read.

Another view of stored records may come in; nothing that a run depends on.
"""
