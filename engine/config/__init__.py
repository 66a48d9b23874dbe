"""Recipes: one TOML file that decides a run, and the reader that turns tables into checked dataclasses.

A new section, key or bound of the recipe may come in; no code that acts on one.
"""
