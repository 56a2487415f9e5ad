"""Hosts over SSH, and the protocol by which a job lives on one."""

from __future__ import annotations
