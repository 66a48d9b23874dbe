"""bench/loss"""
