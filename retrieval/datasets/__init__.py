"""The question sets of the field, each in the files it is published in, turned into one `Question` record.

May come in: policy, rewards; of retrieval, passages.py, corpus.py and questions.py.

`containers` yields the records of a file, whatever it is made of; `formats` is the table of question sets, with their
readers, and says which a file looks like; `convert` samples, mixes and writes; `summary` counts what a converted file
holds. There are no downloads and no registry of splits: a reader is chosen by what a record looks like.
"""
