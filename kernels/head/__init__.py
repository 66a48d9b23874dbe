"""The LM head in Triton: logits that never reach memory.
Imports: kernels/launch.

    head_triton.py    a matmul whose tiles leave sums, and exponentials for the loss
    tiling.py         how it is cut up, on which GPU
"""
