"""`thresher study mask`: what masking of retrieved tokens costs, and what it does to the gradient."""
