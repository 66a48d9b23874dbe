"""engine/evaluation"""
