"""Reinforcement learning of a small mixture-of-experts language model: rollouts record routing, updates replay it."""
