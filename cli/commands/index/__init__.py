"""`thresher index`: one file for each action."""
