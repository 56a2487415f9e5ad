"""The CPU time of a run is that of all its processes, whoever waits for them, and its limit holds for their sum."""

import os

import pytest
from attrs import evolve

from ai_trains_ai.sandbox import account
from ai_trains_ai.sandbox.account import CpuAccount

from .conftest import SMALL

# Each burns SECONDS of CPU in other processes than the first.
BURN = """
import os, signal, sys, time
me = os.getpid()
def burn(seconds=SECONDS):
    while time.process_time() < seconds: pass
    open(f'burnt-{me}', 'w').close()
def wait():
    while not os.path.exists(f'burnt-{me}'): time.sleep(0.02)
    time.sleep(0.3)  # one more look of the server
"""
BURNERS = {
    "reaped": """
pid = os.fork()
if not pid: burn(); os._exit(0)
os.waitpid(pid, 0)""",
    "zombie": """
if not os.fork(): burn(); os._exit(0)
wait()""",
    "left alive": """
if not os.fork(): burn(); time.sleep(60)
wait()""",
    "grandchild left alive": """
if not os.fork():
    if not os.fork(): burn()
    time.sleep(60)
wait()""",
    "daemon": """
pid = os.fork()
if not pid:
    os.setsid()
    if not os.fork(): os.closerange(0, 99); burn(); time.sleep(60)
    os._exit(0)
os.waitpid(pid, 0)
wait()""",
    "discarded": """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
if not os.fork(): burn(); time.sleep(0.25); os._exit(0)
wait(); time.sleep(0.3)""",
    "under another name": """
if not os.fork():
    import ctypes; ctypes.CDLL(None).prctl(15, b') R 1 1 (')
    burn(); time.sleep(60)
wait()""",
}


@pytest.mark.parametrize("name", BURNERS)
async def test_what_other_processes_burn_is_reported(name, run):
    result = await run(BURN.replace("SECONDS", "0.8") + BURNERS[name].replace("SECONDS", "0.8"))
    assert result.outcome == "exited", (result, result.output)
    assert 0.75 * 0.8 < result.cpu_seconds < 0.8 + 0.25, result


@pytest.mark.parametrize("name", BURNERS)
async def test_the_sum_ends_the_run(name, run):
    thrice = "import os\nfor _ in range(2):\n    if not os.fork(): break\n"  # none of them reaches its own limit
    script = (thrice + BURN + BURNERS[name]).replace("SECONDS", "0.9")
    result = await run(script, evolve(SMALL, cpu_seconds=1, wall_seconds=20))
    assert (result.outcome, result.code) == ("cpu_limit", -9), result
    assert 1 < result.cpu_seconds < 2
    assert result.wall_seconds < 8


async def test_one_burner_is_stopped_by_its_own_limit(run):
    script = BURN + "if not os.fork(): burn(20)\ntime.sleep(2)"
    result = await run(script.replace("SECONDS", "1"), evolve(SMALL, cpu_seconds=1, wall_seconds=20))
    assert (result.outcome, result.code) == ("exited", 0)
    assert 0.75 < result.cpu_seconds < 1.2


async def test_a_run_of_one_process_has_the_kernels_own_figure(run):
    script = (
        "import os, time\nwhile time.process_time() < 0.7: pass\nt = os.times(); "
        "import resource; u = resource.getrusage(0); print(u.ru_utime + u.ru_stime, flush=True); os._exit(0)"
    )
    result = await run(script)
    assert 0 <= result.cpu_seconds - float(result.output) < 0.02


async def test_children_that_are_waited_for_are_exact_too(run):
    script = """
import os, resource, time
for n in range(12):
    pid = os.fork()
    if not pid:
        while time.process_time() < 0.02 * n: pass
        os._exit(0)
    os.waitpid(pid, 0)
used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(sum(u.ru_utime + u.ru_stime for u in used), flush=True)
os._exit(0)
"""
    result = await run(script)
    assert 0 <= result.cpu_seconds - float(result.output) < 0.02


class Table:
    """A process table to look at: number to start, own and reaped ticks."""

    def __init__(self, monkeypatch):
        self.rows = {}
        monkeypatch.setattr(account, "_read", self.read)

    def read(self, pid):
        if pid not in self.rows:
            return None
        start, own, reaped = self.rows[pid]
        return (pid, start), account._Times(own, reaped)

    def look(self, cpu, **rows):
        self.rows = {name.strip("p"): row for name, row in rows.items()}
        return round(cpu.look(list(self.rows)) / account._TICK)


def test_nothing_is_counted_twice_or_lost(monkeypatch):
    table, cpu = Table(monkeypatch), CpuAccount()
    assert table.look(cpu, p1=("a", 10, 0)) == 10
    assert table.look(cpu, p1=("a", 10, 0), p2=("b", 50, 0)) == 60
    assert table.look(cpu, p1=("a", 10, 70), p3=("c", 5, 0)) == 85  # 2 was waited for, with 20 more ticks
    assert table.look(cpu, p1=("a", 10, 70), p3=("c", 100, 0)) == 180
    assert table.look(cpu, p1=("a", 10, 70)) == 180  # 3 was discarded
    assert table.look(cpu, p1=("a", 10, 70), p3=("d", 7, 0)) == 187  # another with the same number
    assert cpu.close(90 * account._TICK) == pytest.approx((90 + 100) * account._TICK)  # it was waited for at the end


def test_a_child_that_the_list_of_processes_skips_is_still_there(monkeypatch):
    table, cpu = Table(monkeypatch), CpuAccount()
    table.look(cpu, p1=("a", 0, 0), p2=("b", 50, 0))
    assert round(cpu.look(["1"]) / account._TICK) == 50
    assert table.look(cpu, p1=("a", 0, 0), p2=("b", 60, 0)) == 60


def test_a_run_that_nobody_looked_at_has_the_kernels_figure():
    assert CpuAccount().close(0.0123) == 0.0123


def test_this_process_reads_as_the_kernel_counts_it():
    used = sum(os.times()[:2])
    assert CpuAccount().look([str(os.getpid())]) == pytest.approx(sum(os.times()[:4]), abs=0.1)
    assert used > 0
    assert account._read("0") is None
