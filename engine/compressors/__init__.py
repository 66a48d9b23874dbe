"""Compressors of passages that an extractor is compared with (options.py), and the training data of two of them."""
