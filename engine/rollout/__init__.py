"""engine/rollout"""
