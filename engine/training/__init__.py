"""engine/training"""
