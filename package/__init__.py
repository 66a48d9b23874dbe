"""Thresher: GRPO for small open models that reason over retrieved text.

    thresher.engine      Generator, GenerateRequest, TagMatcher
    thresher.policy      load_policy, load_tokenizer
    thresher.kernels     grpo_loss, token_logprobs
    thresher.rewards     exact_match, f1_score and the systems' rewards
    thresher.retrieval   corpora, encoders, indexes

setup.py maps the other top-level folders of the repository to the packages next to this file.
"""

__version__ = "0.1.0"  # setup.py and CITATION.cff have the same, and tests check it
