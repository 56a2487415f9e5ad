"""Expectations about errors, with the sentence of the interface that they are about."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def no_error(sentence: str) -> Iterator[None]:
    """Fail with ``sentence`` when the block raises."""
    try:
        yield
    except Exception as error:
        pytest.fail(f"{sentence}; it raised {error!r}")


@contextlib.contextmanager
def raises(kind: type[Exception] | tuple[type[Exception], ...], sentence: str) -> Iterator[None]:
    """Fail with ``sentence`` unless the block raises ``kind``."""
    try:
        yield
    except kind:
        return
    except Exception as error:
        pytest.fail(f"{sentence}; it raised {error!r}")
    pytest.fail(f"{sentence}; it raised nothing")
