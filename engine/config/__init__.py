"""The recipe: a TOML file as frozen dataclasses, its presets and its overrides.
Comes in: policy, rewards.
"""
