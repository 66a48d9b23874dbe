"""Search over HTTP: the server with its wire format, and the client, which is a `Retriever` itself.

May import policy, rewards and, of retrieval, indexes and all below them.
"""
