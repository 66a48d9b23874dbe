"""`thresher serve-retriever`: the server, its batches and formats, and the client that asks it.
Comes in: retrieval/data, retrieval/indexes, retrieval/retriever.py, rewards.
"""
