"""`thresher study systems`: every system trained from one base a seed, ARENA from its own, beside a control."""
