"""Recipes and the files they name: data, no code."""
