"""bench/studies/mask"""
