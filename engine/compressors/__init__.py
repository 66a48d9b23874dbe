"""Compressors that keep a part of the passages and write nothing: rows of evidence that an extractor is compared with.

options.py lists them; and the supervised data of one that writes, FilCo. Another may come in, as a class with
`compress` and `count_tokens`. What answers from what is kept, and the file of it, are extraction's business.
"""
