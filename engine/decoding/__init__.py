"""Decoding of many token sequences at once: scheduler, KV cache and its blocks, stop tags. It knows no episodes.

decoder.py      the loop: admission, one forward, sampling; start reading here
decoder_cuda.py the same loop for a GPU, which launches a step before the previous one is read
scheduler.py    the sequences, and which of them run
batch_state.py  the arrays that a step reads and writes; stop tables; acceptance of drawn tokens
kv_cache.py     the tensors of the KV cache; blocks.py: its blocks and the prefix tree
speculative.py  drafts, looked up in earlier text
stop_tags.py    stop strings, found in token ids
generator.py    samples from prompts
"""
