"""Pages, pictures and a live view of runs, from the records in their folders."""
