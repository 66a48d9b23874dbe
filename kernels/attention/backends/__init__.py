"""Attention over whole sequences by a library on CUDA.

libraries.py    one function per library, all with the same signature
choice.py       which one serves a device, a dtype and a head size; chosen once, when a run is set up
parts.py        a library's forward and backward in parts, for prefix.py; also chosen once
"""
