"""The plugin in SGLang's processes: none of them outlives its engine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from actors.engine.serve import ENGINE_ENV

REGISTER = "from actors.engine import plugin; plugin.register_publisher = lambda rank: exit(7); plugin.register()"


@pytest.mark.parametrize(("alive", "code"), [(True, 7), (False, 1)])
def test_a_process_that_starts_after_its_engine_has_ended_ends(alive: bool, code: int) -> None:
    """SGLang's children ask the kernel to end them with their parent, seconds after they were started."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    engine = os.getpid() if alive else ended.pid
    started = subprocess.run([sys.executable, "-c", REGISTER], env={**os.environ, ENGINE_ENV: str(engine)}, timeout=60)
    assert started.returncode == code
