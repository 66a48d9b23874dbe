"""Recipes: one TOML file that determines a run, and the reader that converts tables to checked dataclasses.

Sections, keys and bounds of the recipe belong here; code that acts on them does not.
"""
