"""Attention over whole sequences by a library on CUDA: small adapters to one signature, and the choice among them.

choice.py    which one serves a device, a dtype and a head size; asked once, when a run is put together
adapter.py   what the adapters share: how a library is found, key/value heads repeated
parts.py     a library's forward and backward in parts, for prefix.py; asked once too
sdpa.py, torch_varlen.py, flash.py, xformers.py    one library each
"""
