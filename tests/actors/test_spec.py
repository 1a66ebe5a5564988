"""Claims of actors/engine/spec.py: the command line that SGLang is started with, as SGLang itself reads it."""

from __future__ import annotations

import json

from actors.engine.spec import EngineSpec, KvEventsConfig, LoraConfig, ModelConfig
from router.ids import DpRank


def _spec(**changes: object) -> EngineSpec:
    values: dict[str, object] = {
        "model": ModelConfig(path="/m", served_name="served", context_length=512),
        "kv_events": KvEventsConfig(hwm=7, replay_buffer=9),
        "lora": LoraConfig(adapters={"a": "/a", "b:v2": "/b"}, max_loras_per_batch=3),
        "device": "cuda",
        "host": "10.0.0.1",
        "port": 100,
        "event_port": 200,
        "replay_port": 300,
        "first_dp_rank": DpRank(6),
        "dp_size": 2,
        **changes,
    }
    return EngineSpec(**values)  # type: ignore[arg-type]  # a table of fields


def _read(spec: EngineSpec) -> dict[str, object]:
    """What SGLang's own parser makes of it."""
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return vars(parser.parse_args(spec.arguments()))


def test_sglang_reads_what_was_meant() -> None:
    read = _read(_spec())

    assert read["model_path"] == "/m"
    assert read["served_model_name"] == "served"
    assert (read["host"], read["port"], read["context_length"]) == ("10.0.0.1", 100, 512)
    assert read["enable_lora"] is True
    assert read["enable_cache_report"] is True
    assert read["max_loras_per_batch"] == 3
    assert read["lora_paths"] == ["a=/a", "b:v2=/b"]


def test_events_config_is_one_that_sglang_accepts() -> None:
    from sglang.srt.disaggregation.kv_events import KVEventsConfig

    parsed = KVEventsConfig.from_cli(json.dumps(_spec().events_config()))

    assert (parsed.publisher, parsed.format, parsed.bind) == ("loray_zmq", "dynamo", True)
    assert (parsed.endpoint, parsed.replay_endpoint) == ("tcp://10.0.0.1:200", "tcp://10.0.0.1:300")
    assert (parsed.hwm, parsed.buffer_steps) == (7, 9)


def test_the_users_own_arguments_win() -> None:
    assert _read(_spec(extra_args=("--max-loras-per-batch", "5")))["max_loras_per_batch"] == 5


def test_a_cpu_engine_gets_its_backends_and_a_gpu_engine_does_not() -> None:
    assert "torch_native" in _spec(device="cpu").arguments()
    assert "torch_native" not in _spec().arguments()


def test_no_secret_is_on_the_command_line() -> None:
    assert not any("key" in argument for argument in _spec().arguments())
