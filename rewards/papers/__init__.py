"""Each paper's reward, as printed and as coded.
Comes in: rewards.
"""
