"""Files of records and of passages: JSONL, the shapes a corpus comes in, and the corpus by row.

May come in: policy, rewards; no other room of retrieval.
"""
