"""engine/store"""
