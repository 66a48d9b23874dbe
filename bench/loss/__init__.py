"""`thresher bench loss`: the loss's forward and backward beside peers, over shapes, with error, time and memory."""
