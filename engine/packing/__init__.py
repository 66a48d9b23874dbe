"""Packing: sequences to train on into batches of one forward each, what they begin with alike computed once.

Another way to cut or to share may come in; no loss and no optimiser.
"""
