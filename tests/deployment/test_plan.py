"""Claims of deployment/plan.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployment.config import Config, ConfigError
from deployment.names import actor_name
from deployment.plan import check_applicable, worker_settings

TEXT = """
name: demo
model: {path: /model, served_name: m}
workers: {count: 2, gpus: 0, dp_size: 2, extra_args: [--page-size, "16"]}
"""


def _config(text: str = TEXT) -> Config:
    return Config.parse(text, base=Path("/"))


def test_actor_names_say_what_they_are() -> None:
    assert actor_name("demo", "worker", "w0") == "loray/demo/worker/w0"


def test_worker_settings_carry_the_sections() -> None:
    settings = worker_settings(_config(), 3, api_key="k")

    assert (settings.worker_id, settings.index, settings.dp_size, settings.device) == ("w3", 3, 2, "cpu")
    assert settings.extra_args == ("--page-size", "16")


def test_count_can_be_applied() -> None:
    check_applicable(_config(), _config(TEXT.replace("count: 2", "count: 5")))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("/model", "/other"), "model.path"),
        (("dp_size: 2", "dp_size: 1"), "workers.dp_size"),
        (("name: demo", "name: other"), "also changed: name"),
    ],
)
def test_anything_else_is_refused_by_name(change: tuple[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_applicable(_config(), _config(TEXT.replace(*change)))
