"""What all Triton files have in common: how they are found, and what each compiles its kernels for.

dispatch.py    which tensors Triton serves, and what a launcher asks of them
registry.py    every *_triton.py of kernels/, and the specialisations that it lists
"""
