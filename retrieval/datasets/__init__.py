"""The question sets of the field, each in the files it is published in, turned into one `Question` record.

May come in: policy, rewards; of retrieval, data and questions.py.

`containers` yields the records of a file, whatever it is made of; `row` is what a reader sees of one record;
`multihop`, `short` and `results` hold the readers; `flavours` is the table of them, and says which a file looks like;
`convert` samples, mixes and writes; `summary` counts what a converted file holds.

Deliberately absent: downloads, and a registry of splits: a reader is chosen by what a record looks like.
"""
