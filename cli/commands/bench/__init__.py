"""`thresher bench`: one file for each measurement."""
