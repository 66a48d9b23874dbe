"""The LM head in Triton: logits that never reach memory.

backend.py           a chunk from its rows to log-probs, and to exponentials for the loss: where to begin
head_triton.py       a matmul whose tiles leave sums and exponentials; persistent_triton.py: the same by TMA
reduce_triton.py     the tiles' sums into log-prob and entropy
tiling.py            how it is cut up, on which GPU; winners.py: what was measured on one
"""
