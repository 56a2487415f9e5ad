"""Machines and money: the pool that leases slots to jobs, and the ledger that books what they cost."""

from __future__ import annotations

from ai_trains_ai.fleet.hosted import Held, HostedJob, HostedJobs
from ai_trains_ai.fleet.ledger import Ledger
from ai_trains_ai.fleet.pool import Fleet
from ai_trains_ai.fleet.renting import FleetTimes

__all__ = ["Fleet", "FleetTimes", "Held", "HostedJob", "HostedJobs", "Ledger"]
