"""A retriever behind a URL: the server with its wire format, and the client that is a `Retriever` itself.

May come in: policy, rewards; of retrieval, indexes and all below them.
"""
