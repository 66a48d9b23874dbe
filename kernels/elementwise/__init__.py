"""What a layer does beside its matmuls and its attention.
Imports: nothing.

    layers.py    norm, rotation, gate
"""
