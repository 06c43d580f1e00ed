"""Reinforcement learning of a small mixture-of-experts language model, updated under the routing that it recorded."""
