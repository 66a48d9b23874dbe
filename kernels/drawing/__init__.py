"""What a token is drawn by: each row's rules, its noise, and a way to the token for a GPU and one for a CPU.

What may come in: a step between logits and a drawn id. The door is kernels/sampling.py.

    rules.py     temperature and filters of every row; noise.py: the hash of (seed, position, token), in torch and NumPy
    head_draw_triton.py    on a GPU: out of the tiles of the head's product, without stored logits or noise;
                           draw_tiling.py: how it is cut up
    blocks.py    on a CPU: rows that stay in the cache, and noise for the columns that can still win
"""
