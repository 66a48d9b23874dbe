"""bench/step"""
