"""Runs untrusted code in throw-away jailed children. Only data comes out; every verdict is made by the caller."""

from ai_trains_ai.sandbox.bubblewrap import BubblewrapSandbox, detect
from ai_trains_ai.sandbox.channel import Channel

__all__ = ["BubblewrapSandbox", "Channel", "detect"]
