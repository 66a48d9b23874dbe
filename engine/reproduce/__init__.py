"""A paper's tables as commands: manifests, the commands that a table needs, and the table next to the printed one."""
