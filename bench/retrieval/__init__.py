"""bench/retrieval"""
