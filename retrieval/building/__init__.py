"""retrieval/building"""
