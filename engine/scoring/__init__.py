"""engine/scoring"""
