"""Claims of actors/adapters/checks.py: what can't be served is refused with the value that is wrong, never else."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from actors.adapters.checks import AdapterRejectedError, BaseModel, check_adapter, check_name, read_base_model
from actors.engine.identity import CONFIG_FILE, WEIGHT_FILES
from tests.actors.adapters.making import (
    BASE_CONFIG,
    MODULES,
    NUM_LAYERS,
    RANK,
    WIDTHS,
    key_of,
    make_adapter,
    safetensors_bytes,
    tensors_of,
)

BASE = BaseModel(NUM_LAYERS, WIDTHS)
A, B = key_of(0, "q_proj", "A"), key_of(0, "q_proj", "B")
#: bytes of one matrix of q_proj, in F32
SIZE = RANK * 16 * 4


def check(folder: Path, *, base: BaseModel | None = BASE, targets: Sequence[str] = tuple(WIDTHS)) -> int:
    return check_adapter(folder, base=base, max_rank=8, target_modules=targets)


def tensor(begin: int = 0, end: int = SIZE, *, dtype: Any = "F32", shape: Any = (RANK, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def raw_adapter(folder: Path, content: bytes) -> Path:
    """An adapter whose weights' file is `content`."""
    (make_adapter(folder) / WEIGHT_FILES[0]).write_bytes(content)
    return folder


# -- good ones ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("modules", [("q_proj",), tuple(WIDTHS)])
def test_a_good_adapter_passes_and_tells_its_rank(tmp_path: Path, dtype: type, modules: tuple[str, ...]) -> None:
    tensors = tensors_of(rank=2, modules=modules, dtype=dtype)
    config = {"r": 2, "target_modules": list(modules)}

    assert check(make_adapter(tmp_path / "a", config=config, tensors=tensors)) == 2


def test_a_good_bfloat16_adapter_passes(tmp_path: Path) -> None:
    half = SIZE // 2
    header = {
        "__metadata__": {"format": "pt"},
        A: tensor(0, half, dtype="BF16"),
        B: tensor(half, 2 * half, dtype="BF16", shape=(16, RANK)),
    }
    content = safetensors_bytes(header, struct.pack("<H", 0x7F7F) * SIZE)  # the largest finite value

    assert check(raw_adapter(tmp_path / "a", content)) == RANK


@pytest.mark.parametrize("named", ["all-linear", None, ["model.layers.0.self_attn.q_proj", "v_proj"]])
def test_target_modules_may_be_a_pattern_or_paths(tmp_path: Path, named: object) -> None:
    assert check(make_adapter(tmp_path / "a", config={"target_modules": named}), targets=MODULES) == RANK


def test_shapes_are_not_compared_without_a_base_model(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "a", tensors={A: np.ones((RANK, 99)), B: np.ones((99, RANK))})
    with pytest.raises(AdapterRejectedError, match="F64"):
        check(folder, base=None)
    tensors = {A: np.ones((RANK, 99), np.float32), B: np.ones((99, RANK), np.float32)}

    assert check(make_adapter(folder, tensors=tensors), base=None) == RANK


def test_base_model_is_read_from_its_config(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(BASE_CONFIG))
    assert read_base_model(file) == BASE

    file.write_text(json.dumps({"text_config": {**BASE_CONFIG, "head_dim": 8, "num_experts": 4}}))
    widths = {"q_proj": (16, 32), "k_proj": (16, 16), "v_proj": (16, 16), "o_proj": (32, 16)}
    assert read_base_model(file) == BaseModel(NUM_LAYERS, widths)

    file.write_text("{}")
    assert read_base_model(file) == BaseModel(None, {})


# -- configuration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"r": 16}, r"its rank is 16, engines were started with lora\.max_rank 8"),
        ({"r": "4"}, "rank r is '4', not a positive number"),
        ({"r": 0}, "rank r is 0, not"),
        ({"r": True}, "rank r is True, not"),
        ({"r": None}, "rank r is None, not"),
        ({"r": 4.0}, r"rank r is 4\.0, not"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3', only 'LORA'"),
        ({"use_dora": True}, "DoRA or a rank pattern"),
        ({"rank_pattern": {"q_proj": 8}}, "DoRA or a rank pattern"),
        ({"target_modules": ["q_proj", "lm_head"]}, r"changes module 'lm_head'.*lora\.target_modules \['q_proj', 'v"),
        ({"target_modules": ["q_proj"]}, r"v_proj\.lora_[AB]\.weight' belongs to no module of its target_modules"),
        ({"target_modules": 5}, "target_modules"),
    ],
)
def test_configuration_that_cannot_be_served_is_refused(
    tmp_path: Path, config: dict[str, object], message: str
) -> None:
    with pytest.raises(AdapterRejectedError, match=message):
        check(make_adapter(tmp_path / "a", config=config), targets=MODULES)


@pytest.mark.parametrize(
    "text", ["{", "[]", "7", "\xff", "[" * 100_000], ids=["cut", "list", "number", "bytes", "deep"]
)
def test_configuration_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    folder = make_adapter(tmp_path / "a")
    (folder / CONFIG_FILE).write_bytes(text.encode("latin-1"))

    with pytest.raises(AdapterRejectedError, match=r"adapter_config\.json (can't be read|isn't an object)"):
        check(folder)


# -- weights -----------------------------------------------------------------------------------------------------------


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "a")
    (folder / WEIGHT_FILES[0]).rename(folder / WEIGHT_FILES[1])

    with pytest.raises(AdapterRejectedError, match="pickle"):
        check(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({A: (3, 16)}, r"shape \[3, 16\], which isn't of rank 4"),
        ({B: (16, 3)}, r"shape \[16, 3\], which isn't of rank 4"),
        ({A: (RANK,)}, r"shape \[4\], which"),
        ({A: (RANK, 17)}, r"shape \[4, 17\], the model's q_proj is 16 wide"),
        ({key_of(1, "v_proj", "B"): (16, RANK)}, r"shape \[16, 4\], the model's v_proj is 8 wide"),
        ({key_of(1, "down_proj", "A"): (RANK, 16)}, "the model's down_proj is 32 wide"),
        ({key_of(2, "q_proj", "A"): (RANK, 16)}, "is of layer 2, the model has 2"),
        ({A: None}, r"layers\.0\.q_proj has only one of lora_A and lora_B"),
        ({"base_model.model.lm_head.lora_A.weight": (RANK, 16)}, "isn't a LoRA matrix of a layer"),
        ({"model.layers.0.self_attn.q_proj.weight": (16, 16)}, "isn't a LoRA matrix of a layer"),
    ],
)
def test_matrices_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict[str, tuple[int, ...] | None], message: str
) -> None:
    tensors = tensors_of()
    for key, shape in changes.items():
        tensors.pop(key, None)
        if shape is not None:
            tensors[key] = np.zeros(shape, np.float32)
    config = {"target_modules": [*MODULES, "down_proj"]}

    with pytest.raises(AdapterRejectedError, match=message):
        check(make_adapter(tmp_path / "a", config=config, tensors=tensors))


def test_weights_without_a_matrix_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterRejectedError, match="hold no LoRA matrix"):
        check(raw_adapter(tmp_path / "a", safetensors_bytes({})))


@pytest.mark.parametrize(
    ("dtype", "word"),
    [
        ("F32", struct.pack("<f", float("nan"))),
        ("F32", struct.pack("<f", float("-inf"))),
        ("F16", struct.pack("<e", float("nan"))),
        ("F16", struct.pack("<e", float("inf"))),
        ("BF16", struct.pack("<H", 0x7FC0)),
        ("BF16", struct.pack("<H", 0xFF80)),
    ],
)
def test_infinities_and_nans_are_refused_in_every_dtype(tmp_path: Path, dtype: str, word: bytes) -> None:
    size = RANK * 16 * len(word)
    data = bytes(2 * size - len(word)) + word  # the very last value
    header = {A: tensor(0, size, dtype=dtype), B: tensor(size, 2 * size, dtype=dtype, shape=(16, RANK))}

    with pytest.raises(AdapterRejectedError, match=r"lora_B\.weight' holds an infinity or NaN"):
        check(raw_adapter(tmp_path / "a", safetensors_bytes(header, data)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is damaged"),
        (b"\x01\x00\x00", "is damaged"),
        (safetensors_bytes(b"{"), "is damaged"),
        (safetensors_bytes(b"[]"), "is damaged"),
        (safetensors_bytes(b"[" * 100_000), "is damaged"),
        (safetensors_bytes({A: tensor()}, length=5), "is damaged"),
        (safetensors_bytes({A: tensor()}, length=1 << 40), "a header of 1099511627776 bytes"),
        (safetensors_bytes({A: tensor(8, 4)}), "is damaged"),
        (safetensors_bytes({A: tensor(-4, SIZE - 4)}), "is damaged"),
        (safetensors_bytes({A: tensor(shape=[RANK, -16])}), "is damaged"),
        (safetensors_bytes({A: {"shape": [RANK, 16], "data_offsets": [0, SIZE]}}, bytes(SIZE)), "is damaged|dtype"),
        (safetensors_bytes({A: tensor(dtype=["F32"])}, bytes(SIZE)), "is damaged|dtype|only F"),
        (safetensors_bytes({A: {**tensor(), "data_offsets": [0.0, float(SIZE)]}}, bytes(SIZE)), "is damaged"),
        (safetensors_bytes({A: tensor(1 << 70, (1 << 70) + SIZE)}), "is damaged|missing"),
        (safetensors_bytes({A: tensor(end=SIZE + 4)}, bytes(SIZE + 4)), "has 260 bytes for shape"),
        (safetensors_bytes({A: tensor(end=SIZE // 4, dtype="F8_E4M3")}, bytes(SIZE)), "is F8_E4M3, only BF16, F16"),
        (safetensors_bytes({A: tensor()}, bytes(SIZE - 8)), "is cut short: 8 bytes are missing"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(AdapterRejectedError, match=message):
        check(raw_adapter(tmp_path / "a", content))


def test_a_shape_whose_size_overflows_is_refused(tmp_path: Path) -> None:
    header = {A: tensor(end=0, shape=[RANK, 1 << 62]), B: tensor(end=0, shape=[1 << 62, RANK])}

    with pytest.raises(AdapterRejectedError):
        check(raw_adapter(tmp_path / "a", safetensors_bytes(header)), base=None)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "a")
    whole = (folder / WEIGHT_FILES[0]).read_bytes()
    for size in (*range(0, len(whole) - 64, 17), *range(len(whole) - 64, len(whole))):
        with pytest.raises(AdapterRejectedError):
            check(raw_adapter(folder, whole[:size]))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_file_with_a_flipped_bit_is_refused_or_one_that_the_engine_can_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = make_adapter(tmp_path_factory.getbasetemp() / "flipped")
    content = bytearray((folder / WEIGHT_FILES[0]).read_bytes())
    header_end = 8 + int.from_bytes(content[:8], "little")
    content[data.draw(st.integers(0, header_end))] ^= 1 << data.draw(st.integers(0, 7))
    (folder / WEIGHT_FILES[0]).write_bytes(content)
    try:
        check(folder)
    except AdapterRejectedError:
        return

    with safe_open(folder / WEIGHT_FILES[0], "np") as file:
        assert all(np.isfinite(file.get_tensor(key)).all() for key in file.keys())  # noqa: SIM118  # no mapping


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "team/ad", "ad:v2", "s3://b/m", "gpt-oss:120b", "with blank", "x" * 128, "ж"])
def test_a_good_name_passes_as_it_is(name: str) -> None:
    assert check_name(name, served_name="base", taken=["other", name]) == name


def test_a_name_is_put_into_its_normal_form() -> None:
    assert check_name("e\u0301", served_name="base", taken=["\u00e9"]) == "\u00e9"


@pytest.mark.parametrize("name", ["", " a", "a ", "a\n", "a\x00b", "a\u200bb", "x" * 129])
def test_a_name_that_is_not_printable_trimmed_and_short_is_refused(name: str) -> None:
    with pytest.raises(AdapterRejectedError, match="must be printable, trimmed, and 1 to 128 characters long"):
        check_name(name, served_name="base")


def test_a_name_with_an_equals_sign_is_refused() -> None:
    with pytest.raises(AdapterRejectedError, match="must not hold '='"):
        check_name("a=b", served_name="base")


@pytest.mark.parametrize("name", ["base", "base:", "base:ad", "base:ad:v2"])
def test_a_name_like_the_served_model_is_refused(name: str) -> None:
    with pytest.raises(AdapterRejectedError, match="is named like the served model 'base'; rename it"):
        check_name(name, served_name="base")
    assert check_name("base2", served_name="base") == "base2"


@pytest.mark.parametrize("name", ["SQL", "\uff53\uff51\uff4c", "s\u24e0l", "Sql"])
def test_a_name_that_looks_like_another_is_refused(name: str) -> None:
    with pytest.raises(AdapterRejectedError, match="can't be told from 'sql', which is taken"):
        check_name(name, served_name="base", taken=["other", "sql"])
