"""A paper's tables as commands: manifests, what has to be run for a table, and the table beside the printed one."""
