"""Sequences of tokens, sampled side by side: scheduler, KV cache and its blocks, stop tags. It knows no episodes.

decoder.py      the loop: admit, one forward, one draw; where to begin. clock.py: what it counts
device.py       the same loop for a GPU, launched ahead of what is read; bucket_step.py: one step of it, with drafts
sequences.py    what the host keeps of a sequence; lanes.py: the arrays that a step reads and writes
scheduler.py    who runs; cache/: the KV cache, its blocks and its tensors
drafts.py       guesses at what comes next; verify.py: of what was drawn, what stands
stop_tags.py    strings found in token ids
generator.py    prompts in, samples out, for whoever has no episode; text_stream.py: one, while it is drawn
"""
