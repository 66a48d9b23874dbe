"""What lives here: one file a model family, with its layer, its tensors' names and its rules for config.json.

What may come in: another family, as one file and one row in `registry.py` (docs/add/model.md).
"""
