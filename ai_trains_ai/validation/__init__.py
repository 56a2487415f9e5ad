"""Staged verdict on a submission: parse, schema, static scan, load, sanity battery, freeze."""

from ai_trains_ai.validation.codes import CODES
from ai_trains_ai.validation.validator import PRELOAD, Validator

__all__ = ["CODES", "PRELOAD", "Validator"]
