"""retrieval/serving"""
