"""How deployments and their actors are called in Ray."""

from __future__ import annotations

from typing import Final

NAMESPACE: Final = "loray"
"""Ray namespace of all deployments."""


def actor_name(deployment: str, *parts: str) -> str:
    """Name that the dashboard shows, such as `loray/demo/worker/w0`."""
    return "/".join((NAMESPACE, deployment, *parts))
