"""A checkpoint folder with anything wrong in it gives one of our errors that names it, whatever it is."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from glassllm_checkpoint import save_as_huggingface
from safetensors.torch import load_file, save_file

from nki_parallel_attn.errors import ArgumentError, NkiParallelAttnError, UnsupportedFeatureError
from nki_parallel_attn.integrations.glassllm import load_glassllm
from nki_parallel_attn.integrations.huggingface import load_checkpoint, read_config

FILES = ("config.json", "model.safetensors", "tokenizer.json")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    save_as_huggingface(load_glassllm(), folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"null", b"\xff\xfe{}", b"\x00" * 64, b"not a file of this kind"]
)
@pytest.mark.parametrize("name", FILES)
def test_content_of_another_kind(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(ArgumentError, match=name.replace(".", r"\.")):
        load_checkpoint(folder)


@pytest.mark.parametrize("name", FILES)
def test_truncated_anywhere(folder: Path, name: str) -> None:
    whole = (folder / name).read_bytes()
    for part in (1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 2, len(whole) - 1):
        (folder / name).write_bytes(whole[: min(part, len(whole) - 1)])
        with pytest.raises(ArgumentError, match=name.replace(".", r"\.")):
            load_checkpoint(folder)


@pytest.mark.parametrize("name", FILES)
def test_any_byte_damaged(folder: Path, name: str) -> None:
    """It may still be a checkpoint; if it is not, we say so."""
    whole, source = (folder / name).read_bytes(), random.Random(1)
    for _ in range(40):
        damaged = bytearray(whole)
        damaged[source.randrange(min(len(whole), 5000))] = source.randrange(256)
        (folder / name).write_bytes(damaged)
        with contextlib.suppress(NkiParallelAttnError):
            load_checkpoint(folder)


@pytest.mark.parametrize(
    "index", ["{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "[]", '{"weight_map": {"a": "gone.safetensors"}}']
)
def test_index(folder: Path, index: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ArgumentError, match=r"index\.json|gone\.safetensors"):
        load_checkpoint(folder)


def test_weights_that_are_no_floats(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**weights, name: weights[name].to(torch.int8)}, folder / "model.safetensors")
    with pytest.raises(UnsupportedFeatureError, match=r"up_proj.*int8"):
        load_checkpoint(folder)


RAW: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32,
        "beta_slow": 1,
        "attention_factor": 1.0,
        "mscale": 1.0,
        "truncate": True,
    },
}
WINDOW = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
ODD_VALUES = (0, -1, 2.5, True, "8", [], [8], {}, {"a": 1}, float("nan"), float("inf"))


@pytest.mark.parametrize("value", ODD_VALUES, ids=repr)
def test_any_entry_of_any_value(value: Any) -> None:
    """Each entry of config.json with each odd value is read, or refused under its name."""
    raws = [({**RAW, name: value}, name) for name in RAW]
    raws += [({**RAW, **WINDOW, "rope_scaling": None, name: value}, name) for name in (*WINDOW, "layer_types")]
    for kind in ("yarn", "llama3", "linear", "dynamic"):
        scaling = {**RAW["rope_scaling"], "rope_type": kind, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        raws += [({**RAW, "rope_scaling": {**scaling, name: value}}, name) for name in scaling]
    for raw, name in raws:
        try:
            read_config(raw)
        except NkiParallelAttnError as error:
            assert name.removeprefix("rope_scaling").replace("_", " ")[:4] in str(error).replace("_", " "), error


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rope_theta": "1e6"}, "rope_theta"),
        ({"rope_scaling": [4]}, "rope_scaling"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({**WINDOW, "sliding_window": "9"}, "sliding_window"),
        ({**WINDOW, "layer_types": ["full_attention"]}, "layer_types"),
        ({"rope_scaling": {**RAW["rope_scaling"], "factor": "4"}}, "factor"),
    ],
)
def test_entries_that_cannot_be(changes: dict[str, Any], argument: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        read_config({**RAW, **changes})
    assert raised.value.argument == argument


def test_config_survives_json(folder: Path) -> None:
    """The odd values above come out of real files too: Python's JSON reads NaN."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": float("nan")}))
    with pytest.raises(ArgumentError, match="rms_norm_eps"):
        load_checkpoint(folder)
