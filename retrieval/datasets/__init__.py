"""Published question sets, converted to `Question` records: files (containers), readers (formats), mixing, counts.

Imports policy and rewards; of retrieval passages.py, corpus.py and questions.py.
"""
