"""engine/synthetic"""
