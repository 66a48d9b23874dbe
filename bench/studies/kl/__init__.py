"""`thresher study kl`: KL estimators from one token to a training run."""
