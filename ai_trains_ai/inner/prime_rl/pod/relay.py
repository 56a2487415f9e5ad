"""Carries TCP connections between two network namespaces, one port each way.

A relay is two processes, one in each namespace, with a socket between them: sockets belong to the namespace in which
they were made, and can be handed over. Each accepts on its own port and hands what it accepted to the other, which
connects it to its own target and copies. Half-closed connections stay half open.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
from collections.abc import Callable

COPY = 1 << 16


def listen(port: int) -> socket.socket:
    """A listening socket of this process's namespace."""
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("127.0.0.1", port))
    server.listen(512)
    return server


def relay(server: socket.socket, other: socket.socket, target: int) -> None:
    """Hand what ``server`` accepts to ``other``, connect what comes from there to ``target``, until that is closed."""
    with selectors.DefaultSelector() as ready, server, other:
        ready.register(server, selectors.EVENT_READ, lambda: _hand_over(server, other))
        ready.register(other, selectors.EVENT_READ, lambda: _take(other, target))
        while True:
            for key, _ in ready.select():
                work: Callable[[], bool] = key.data
                if not work():
                    return


def _hand_over(server: socket.socket, other: socket.socket) -> bool:
    try:
        accepted, _ = server.accept()
    except OSError:  # it was gone again
        return True
    with accepted:
        try:
            socket.send_fds(other, [b"c"], [accepted.fileno()])
        except OSError:
            return False
    return True


def _take(other: socket.socket, target: int) -> bool:
    said, descriptors, _, _ = socket.recv_fds(other, 1, 8)
    for descriptor in descriptors:
        threading.Thread(target=_serve, args=(socket.socket(fileno=descriptor), target), daemon=True).start()
    return bool(said)


def _serve(client: socket.socket, target: int) -> None:
    with client, contextlib.suppress(OSError):
        with socket.create_connection(("127.0.0.1", target), timeout=10) as server:
            for end in (client, server):
                end.settimeout(None)
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            back = threading.Thread(target=_copy, args=(server, client), daemon=True)
            back.start()
            _copy(client, server)
            back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Until the source says no more; then the target is told so. A broken side breaks the other."""
    try:
        while data := source.recv(COPY):
            target.sendall(data)
    except OSError:
        with contextlib.suppress(OSError):
            source.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def serve_forever(server: int, other: int, target: int) -> None:
    """`relay` on descriptors that this process was given, and then its end."""
    try:
        relay(socket.socket(fileno=server), socket.socket(fileno=other), target)
    finally:
        os._exit(0)
