"""Reinforcement learning of a small mixture-of-experts language model, with updates that replay recorded routing."""
