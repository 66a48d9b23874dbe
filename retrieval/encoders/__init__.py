"""retrieval/encoders"""
