"""What a token is drawn by: each row's rules, its noise, and a CPU's way to the same token with fewer passes.
Imports: nothing.

What may come in: a step between logits and a drawn id. The door is kernels/sampling.py.

    rules.py     temperature and filters of every row; noise.py: the hash of (seed, position, token), in torch and NumPy
    blocks.py    rows that stay in the cache, and noise for the columns that can still win
"""
