"""engine/extraction"""
