"""The invented world and its files, a judge and base models for it, random models, and the demo."""
