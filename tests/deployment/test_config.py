"""Claims of deployment/config.py: every recipe loads, every mistake is named with its place and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployment.config import Config, ConfigError

RECIPES = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))
GOOD = """
name: demo
model: {path: ./model, served_name: m}
workers: {count: 2, gpus: 0}
lora: {adapters: {a: adapters/a, b: /abs/b}}
"""


def _parse(text: str) -> Config:
    return Config.parse(text, base=Path("/base"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_every_recipe_loads_and_is_complete(recipe: Path) -> None:
    config = Config.load(recipe)

    assert config.workers.count >= 2
    described = (recipe.parent / "README.md").read_text()
    assert f"`{recipe.name}`" in described
    for path in config.lora.adapters.values():
        assert Path(path).is_absolute()


def test_adapters_that_must_be_loaded_must_fit() -> None:
    text = GOOD.replace("a: adapters/a", "a: {path: a, placement: everywhere}, c: {path: c, placement: replicas}")
    text = text.replace("lora: {", "lora: {max_loras_per_batch: 1, max_loaded: 1, ")
    with pytest.raises(ConfigError, match=r"2 adapters are placed everywhere or by replicas, but lora.max_loaded is 1"):
        _parse(text)


def test_engines_that_cannot_load_take_folders_everywhere_only() -> None:
    text = GOOD.replace("gpus: 0", "gpus: 0, dp_size: 2")
    assert _parse(text).workers.dp_size == 2
    for wrong in ("{path: /a, placement: on_demand}", "hf://org/repo"):
        with pytest.raises(ConfigError, match=r"adapter 'a' must be a folder, placed everywhere"):
            _parse(text.replace("a: adapters/a", f"a: {wrong}"))


def test_many_adapters_are_loaded_on_demand_and_few_everywhere() -> None:
    few = _parse(GOOD).lora
    many = _parse(GOOD.replace("a: adapters/a", ", ".join(f"a{i}: adapters/a{i}" for i in range(9)))).lora
    assert (few.default_placement, few.capacity) == ("everywhere", 32)
    assert (many.default_placement, many.capacity) == ("on_demand", 32)


def test_sources_elsewhere_stay_as_they_are() -> None:
    lora = _parse(GOOD.replace("a: adapters/a", "a: {path: 'hf://org/repo@v1', pinned: true}, c: s3://bucket/c")).lora
    assert {name: one.path for name, one in lora.configured.items()} == {
        "a": "hf://org/repo@v1",
        "b": "/abs/b",
        "c": "s3://bucket/c",
    }


def test_relative_folders_are_resolved_against_the_file() -> None:
    config = _parse(GOOD)

    assert config.model.path == "/base/model"
    assert config.lora.adapters == {"a": "/base/adapters/a", "b": "/abs/b"}


def test_a_hub_id_stays_as_it_is() -> None:
    assert _parse(GOOD.replace("./model", "org/model-1b")).model.path == "org/model-1b"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("gpus: 0", "gpus: 0, gpu: 1"), "unknown field `gpu` - at `workers`; known here: count, gpus, cpus"),
        (("count: 2", "count: 0"), "Expected `int` >= 1 - at `workers.count`"),
        (("count: 2", "count: two"), "Expected `int`, got `str` - at `workers.count`"),
        (("count: 2, ", ""), "missing required field `count` - at `workers`"),
        (("name: demo", "name: Demo!"), "matching regex"),
        (("name: demo", "name: demo\nrouters: {}"), "unknown field `routers`; known here: name, model, workers"),
        (("a: adapters/a", "a: adapters/a, a: adapters/b"), "key 'a' is given twice"),
        (("a: adapters/a", "m: adapters/a"), "adapter 'm' is named like the served model 'm'"),
        (("a: adapters/a", "A: adapters/a, a: adapters/a"), "name 'a' can't be told from 'A', which is taken"),
        (("a: adapters/a", "a: {path: x, placement: here}"), "Invalid enum value 'here' - at `lora.adapters"),
        (("lora: {", "lora: {max_loaded: 4, "), "lora.max_loaded is 4, less than lora.max_loras_per_batch 8"),
        (("a: adapters/a", "'a ': adapters/a"), "name 'a ' must be printable, trimmed"),
        (("a: adapters/a", "'a=b': adapters/a"), "must not hold '='"),
        (("gpus: 0", "gpus: 3"), "workers.gpus is 3, but model.tensor_parallel 1 * workers.dp_size 1 needs 1"),
        (("served_name: m", "served_name: m, tensor_parallel: 2"), "model.tensor_parallel must be 1 on the CPU"),
        (("name: demo", "name: demo\nrouter: {port: 70000}"), "Expected `int` <= 65535 - at `router.port`"),
        (("name: demo", "name: demo\nkv_events: {format: vllm}"), "at `kv_events.format`"),
        (("name: demo", "name: [demo"), "not valid YAML"),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else None,
)
def test_a_mistake_is_named(change: tuple[str, str], message: str) -> None:
    text = GOOD.replace(*change)
    assert text != GOOD

    with pytest.raises(ConfigError) as error:
        _parse(text)

    assert message in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read configuration .*nothing.yaml: No such file"):
        Config.load(tmp_path / "nothing.yaml")


def test_an_error_in_a_file_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("name: demo")

    with pytest.raises(ConfigError, match=rf"{file}: Object missing required field"):
        Config.load(file)
