"""What differs between versions of prime-rl, one file a version. A new version is a new file and a line here."""

from __future__ import annotations

from typing import Final

from ai_trains_ai.errors import UnknownName
from ai_trains_ai.inner.prime_rl.profiles import head, v080
from ai_trains_ai.inner.prime_rl.profiles.base import Layout, Locks, Place, Profile, Site

__all__ = ["DEFAULT", "PROFILES", "Layout", "Locks", "Place", "Profile", "Site", "profile"]

PROFILES: Final = {known.version: known for known in (v080.PROFILE, head.PROFILE)}
DEFAULT: Final = v080.PROFILE.version


def profile(version: str = DEFAULT) -> Profile:
    """The profile of a version of prime-rl."""
    if version not in PROFILES:
        raise UnknownName.of("prime-rl version", version, PROFILES)
    return PROFILES[version]
