"""The memory and time that a run needs, by arithmetic, before anything is loaded."""
