"""Sequences of tokens, sampled side by side: scheduler, KV cache and its blocks, stop tags. It knows no episodes.

decoder.py      the loop: admit, one forward, one draw; where to begin
decoder_cuda.py the same loop for a GPU, launched ahead of what is read
scheduler.py    the sequences, and which of them run
batch_state.py  the arrays that a step reads and writes; stop tables; which of the drawn tokens are accepted
kv_cache.py     the tensors of the KV cache; blocks.py: its blocks and the prefix tree
speculative.py  drafts, looked up in earlier text
stop_tags.py    strings found in token ids
generator.py    prompts in, samples out
"""
