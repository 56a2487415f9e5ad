"""Runners of training jobs, and the vocabulary of hyperparameters that they share."""
