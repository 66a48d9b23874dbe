"""Sequences of tokens, sampled side by side: scheduler, KV cache and its blocks, stop tags. It knows no episodes.
Imports: kernels, kernels/attention, kernels/attention/backends, kernels/drawing, kernels/elementwise, policy,
rewards.

    decoder.py      the loop: admit, one forward, one draw; where to begin
    sequences.py    what the host keeps of a sequence; lanes.py: the arrays that a step reads and writes
    scheduler.py    who runs; blocks.py: who owns which block, and what lies in it
    kv_cache.py     the cache's tensors, and a forward's view of them
    drafts.py       guesses at what comes next; verify.py: of what was drawn, what stands
    stop_tags.py    strings found in token ids
    generator.py    prompts in, samples out, for whoever has no episode; text_stream.py: one, while it is drawn
"""
