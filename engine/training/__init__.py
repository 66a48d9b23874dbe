"""Training: the GRPO loop, one optimiser step, SFT and its data."""
