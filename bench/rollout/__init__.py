"""`thresher bench rollout`: our rollout beside Hugging Face's `generate` and `generate_batch`."""
