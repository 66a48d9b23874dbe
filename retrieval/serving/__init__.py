"""A retriever behind a URL: the server, its wire format, and the client that is a `Retriever` itself.

May come in: policy, rewards, indexes; in client, http and wire, of retrieval only data and retriever.py.
"""
