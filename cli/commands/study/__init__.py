"""`thresher study`: one file for each claim."""
