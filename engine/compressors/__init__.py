"""Compressors of passages, baselines of an extractor (options.py); training data of two, and training of RECOMP."""
