"""Attacks on the program itself: kills, damaged files, malformed records, hostile requests, rewards without merit.
Imports: bench/machine.py, bench/rows.py, engine/console.py, engine/scoring, engine/store, engine/systems,
policy, rewards.

`thresher bench torture` carries them out, counted and seeded, and keeps a row; docs/reliability.md shows it.
"""
