"""Pods rented from Runpod."""
