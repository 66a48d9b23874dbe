"""Attention in two forms that share one mathematics: whole sequences for training, new rows against a cache.

varlen.py   sequences packed one after the other, differentiable: the update
prefix.py   the same for sequences that share their beginnings, each segment once; parts.py: attention to some keys
paged_cpu.py    rows against keys and values in blocks: the rollout on a CPU, the same bits in any batch; tiles.py: of
            how many rows its products are
paged_cuda.py   the same for CUDA, with its torch reference; rows.py: which rows attend to which blocks
decode_triton.py    few rows a sequence, keys in parts; cascade_triton.py: a shared prefix read once, parts merged
prefill_triton.py   many rows: prompts, passages
backends/   libraries for training and for fresh prompts on CUDA, and the choice among them
"""
