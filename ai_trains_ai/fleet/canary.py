"""What a new pod has to show before it gets a job: that it answers, and that its GPUs are those that were rented."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ai_trains_ai.interfaces import Transport
from ai_trains_ai.records import Offer

Canary = Callable[[Transport, Offer], Awaitable[str]]

QUERY = "name,driver_version,memory.total,memory.used,ecc.errors.uncorrected.volatile.total"
USED_MIB = 2048  # memory that is taken on a GPU which nobody should use yet
# with torch there, every GPU multiplies two matrices and the result is compared with the CPU's
MATMUL = """
import sys
try:
    import torch
except ImportError:
    sys.exit(0)
count = int(sys.argv[1])
if torch.cuda.device_count() != count:
    sys.exit(f"torch sees {torch.cuda.device_count()} GPUs, not {count}")
a = torch.arange(256 * 256, dtype=torch.float32).reshape(256, 256) % 7
for device in range(count):
    if not torch.equal((a.to(f"cuda:{device}") @ a.to(f"cuda:{device}")).cpu(), a @ a):
        sys.exit(f"GPU {device} multiplies wrongly")
"""


async def answers(transport: Transport, offer: Offer) -> str:
    """The default canary. Says what is wrong, if something is; a machine that can't be asked is wrong, too."""
    why = await responds(transport)
    if why or offer.gpu_type == "cpu" or offer.count == 0:
        return why
    return await _gpus(transport, offer.count) or await _matmul(transport, offer.count)


async def responds(transport: Transport) -> str:
    """What is wrong with a machine that doesn't run the simplest command."""
    status, _ = await transport.run(["true"], timeout=120)
    return "" if status == 0 else f"a command ended with status {status}"


async def _gpus(transport: Transport, count: int) -> str:
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    status, said = await transport.run(command, timeout=60)
    text = said.decode("utf-8", "replace")
    if status != 0:
        return f"nvidia-smi ended with status {status}: {text.strip()[-200:]}"
    gpus = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.count(",") == 4]
    if len(gpus) != count:
        return f"nvidia-smi shows {len(gpus)} GPUs, not {count}"
    for name, driver, total, used, errors in gpus:
        if not driver or not total.isdigit() or int(total) == 0:
            return f"{name} shows no driver or no memory"
        if used.isdigit() and int(used) > USED_MIB:
            return f"{name} has {used} MiB in use before any job"
        if errors.isdigit() and int(errors) > 0:
            return f"{name} has {errors} uncorrectable memory errors"
    return ""


async def _matmul(transport: Transport, count: int) -> str:
    status, said = await transport.run(["python3", "-c", MATMUL, str(count)], timeout=180)
    if status in (0, 127):  # no Python: nothing to try it with
        return ""
    return f"the GPUs can't compute (status {status}): {said.decode('utf-8', 'replace').strip()[-300:]}"
