"""A local Tinker: the SDK's own wire protocol, a tiny model with a real LoRA adapter and real gradients, and faults.

>>> with tinker_server(tmp_path) as server:
...     client = tinker.ServiceClient(base_url=server.url, api_key="tml-local")
"""

from __future__ import annotations

from fakes.tinker.faults import Fault
from fakes.tinker.server import MODEL, TinkerServer, tinker_server

__all__ = ["MODEL", "Fault", "TinkerServer", "tinker_server"]
