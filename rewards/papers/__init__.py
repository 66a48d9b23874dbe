"""rewards/papers"""
