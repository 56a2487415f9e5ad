"""Commands and files over a real sshd: quoting, loss, reconnection, host keys."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from attrs import evolve
from fakes.sshd import QUICK, Server

from ai_trains_ai.errors import ConfigurationError, Transient, TransportError
from ai_trains_ai.transport.ssh import SSHTransport


async def test_a_command_with_its_input_output_and_status(shell: SSHTransport) -> None:
    assert await shell.run(["cat"], stdin=b"in\x00put") == (0, b"in\x00put")
    assert await shell.run(["sh", "-c", "echo out; echo err >&2; exit 7"]) == (7, b"out\nerr\n")
    assert await shell.run(["printf", "%s|", "a b", "$HOME", "'\"", "*", ""]) == (0, b"a b|$HOME|'\"|*||")
    assert (await shell.run(["no-such-program"]))[0] == 127
    assert (await shell.run(["sh", "-c", "kill -9 $$"]))[0] == 137


async def test_a_command_that_takes_too_long(shell: SSHTransport) -> None:
    assert await shell.run(["sleep", "30"], timeout=0.2) == (None, b"")
    assert await shell.run(["echo", "next"]) == (0, b"next\n")


async def test_many_commands_at_once_on_one_connection(shell: SSHTransport, server: Server) -> None:
    done = await asyncio.gather(*(shell.run(["sh", "-c", f"sleep 0.2; echo {n}"]) for n in range(20)))
    assert done == [(0, f"{n}\n".encode()) for n in range(20)]
    assert (server.folder / "sshd.log").read_text().count("Accepted publickey") == 1


async def test_files_go_and_come_back_whole(shell: SSHTransport, tmp_path: Path) -> None:
    target = tmp_path / "with blank and 'quote'"
    files = {"a.txt": b"one", "deep/er/b.bin": os.urandom(300_000), "empty": b"", "-odd name": b"x"}
    await shell.put(files, str(target))
    await shell.put({"a.txt": b"two"}, str(target))
    for path, data in (files | {"a.txt": b"two"}).items():
        assert await shell.get(str(target / path), 1 << 20) == data
    assert not list(target.glob(".put*"))
    with pytest.raises(TransportError, match="larger than 2"):
        await shell.get(str(target / "a.txt"), 2)
    with pytest.raises(TransportError, match="there is no file"):
        await shell.get(str(target / "nothing"), 2)
    with pytest.raises(ConfigurationError, match="no path below"):
        await shell.put({"../out": b""}, str(target))
    (tmp_path / "file").write_text("")
    with pytest.raises(TransportError, match="can't write"):
        await shell.put({"x": b""}, str(tmp_path / "file"))


async def test_a_log_by_offset(shell: SSHTransport, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert await shell.tail(str(log), 0) == b""
    log.write_bytes(b"line one\nline two\n")
    assert await shell.tail(str(log), 0, 4) == b"line"
    assert await shell.tail(str(log), 9) == b"line two\n"
    assert await shell.tail(str(log), 18) == b""
    assert await shell.tail(str(log), 99) == b""


async def test_a_port_of_the_host(shell: SSHTransport) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        writer.close()

    service = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with service, shell.forward(service.sockets[0].getsockname()[1]) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"hello\n")
        assert await reader.readline() == b"hello\n"
        writer.close()


# ------------------------------------------------------------------------------------------ what goes wrong


async def test_a_host_that_goes_is_never_success_and_is_found_again(shell: SSHTransport, server: Server) -> None:
    running = asyncio.create_task(shell.run(["sleep", "30"]))
    await shell.run(["true"])
    await asyncio.sleep(0.2)
    server.stop()
    status, _ = await asyncio.wait_for(running, 10)
    assert status is None
    server.start()
    assert await shell.run(["echo", "back"]) == (0, b"back\n")


async def test_a_host_that_does_not_answer(server: Server) -> None:
    server.stop()
    shell = SSHTransport(server.host, evolve(QUICK, total=0.3))
    with pytest.raises(Transient, match="can't be reached"):
        await shell.run(["true"])
    await shell.close()
    await shell.close()
    with pytest.raises(TransportError, match="closed"):
        await shell.run(["true"])


async def test_another_host_key_than_before_is_refused(shell: SSHTransport, server: Server) -> None:
    await shell.run(["true"])
    server.stop()
    other = Server(server.folder / "other")
    for name in ("host", "host.pub"):
        (server.folder / name).write_bytes((other.folder / name).read_bytes())
    server.start()
    with pytest.raises(TransportError, match="another host key"):
        await shell.run(["true"])


async def test_a_known_host_key(server: Server) -> None:
    line = (server.folder / "host.pub").read_text()
    shell = SSHTransport(evolve(server.host, known_host=line), QUICK)
    assert await shell.run(["echo", "known"]) == (0, b"known\n")
    await shell.close()


async def test_keys_that_do_not_fit(server: Server, tmp_path: Path) -> None:
    stranger = Server(tmp_path / "stranger")
    shell = SSHTransport(evolve(server.host, key=str(stranger.folder / "client")), QUICK)
    with pytest.raises(TransportError, match="refuses the key"):
        await shell.run(["true"])
    with pytest.raises(ConfigurationError, match="private key '/nothing' can't be read"):
        await SSHTransport(evolve(server.host, key="/nothing"), QUICK).run(["true"])
