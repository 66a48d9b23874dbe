"""The KV cache: blocks of it, who owns them and what lies in them, and its tensors as a forward reads and writes them.

blocks.py      who owns which block, and what tokens lie in it
kv_cache.py    the tensors, for a CPU and for a GPU, and a forward's view of them
"""
