"""Attention in two forms with the same mathematics: whole sequences for training, new rows against a cache.

varlen.py   sequences packed one after the other, differentiable: the update
prefix.py   the same for sequences that share prefixes, each segment once; parts.py: attention to some of the keys
paged_cpu.py    rows against keys and values in blocks: the rollout on a CPU, the same bits in any batch; tiles.py: the
            number of rows of its products
paged_cuda.py   the same for CUDA, with its torch reference; rows.py: which rows attend to which blocks
decode_triton.py    few rows per sequence, keys in parts; cascade_triton.py: a shared prefix read once, parts merged
prefill_triton.py   many rows: prompts, passages
backends/   libraries for training and for fresh prompts on CUDA, and the choice among them
"""
