"""engine/protocol"""
