"""Extractors in use: evidence from passages, read by other models or inside an agent's searches."""
