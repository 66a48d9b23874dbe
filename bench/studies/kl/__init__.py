"""bench/studies/kl"""
