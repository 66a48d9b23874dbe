"""Attention over whole sequences by a library on CUDA.

libraries.py    one function a library, all of one signature
choice.py       which one serves a device, a dtype and a head size; asked once, when a run is put together
parts.py        a library's forward and backward in parts, for prefix.py; asked once too
"""
