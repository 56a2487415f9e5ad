"""Outer policies and their trainers."""
