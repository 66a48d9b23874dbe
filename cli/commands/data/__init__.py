"""`thresher data`: one file for each action."""
