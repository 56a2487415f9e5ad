"""Reward functions: what an episode is paid."""
