"""What a layer does beside its matmuls and its attention.

layers.py    norm, rotation, gate: the functions that a model calls, in torch, and for a CPU
norm_triton.py, gate_triton.py    residual sum and norm, and the gate, with their gradients, a kernel each
heads_triton.py    the norm of each query head and each key head, with its gradient
rope_triton.py    rotation of queries and keys, and their way into the KV cache, in one kernel
"""
