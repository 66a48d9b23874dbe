"""Attacks on the program itself: kills, damaged files, malformed records, hostile requests, rewards without merit.

`thresher bench torture` carries them out, counted and seeded, and keeps a row; docs/reliability.md shows it.
"""
