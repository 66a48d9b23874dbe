"""What else gets a run's metrics: TensorBoard, Weights & Biases, trackio.

Another tracker may come in, as a class of send.py; nothing that a run waits for.
"""
