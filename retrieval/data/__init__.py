"""retrieval/data"""
