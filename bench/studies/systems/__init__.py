"""bench/studies/systems"""
