"""Invented data: a world of facts, warm-up transcripts in every protocol, random models, the demo.

Another generator may come in, as long as everything is a function of its seed.
"""
