"""Where a service is, as a user writes it."""

from __future__ import annotations

from urllib.parse import urlsplit

from ai_trains_ai.errors import ConfigurationError


def endpoint(base_url: str | None) -> str | None:
    """The address, unless it is none that a client could ask. ``None`` is the service's own.

    Raises:
        ConfigurationError: no scheme, no host, or a port that is no number.
    """
    if base_url is None:
        return None
    try:
        parts = urlsplit(base_url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except (ValueError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise ConfigurationError(f"base_url={base_url!r} is no address. Write it like http://127.0.0.1:8000/v1.")
    return base_url
