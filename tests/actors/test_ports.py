"""Claims of actors/ports.py."""

from __future__ import annotations

import random
import socket

import pytest

from actors.ports import NoPortsError, reserve

HOST = "127.0.0.1"


def test_reserved_ports_can_all_be_bound() -> None:
    first = reserve(HOST, 5, first=None, rng=random.Random(1))

    for port in range(first, first + 5):
        with socket.socket() as one:
            one.bind((HOST, port))


def test_a_wanted_run_with_a_taken_port_is_refused_by_name() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]

        with pytest.raises(NoPortsError, match=f"ports {port - 1} to {port + 1}"):
            reserve(HOST, 3, first=port - 1, rng=random.Random(1))
