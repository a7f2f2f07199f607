"""A source checkpoint is read exactly, wherever its tensors lie, and every lie in it is refused."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from ssmd.model.source import Source, SourceError

CONFIG = {"model_type": "llama", "hidden_size": 8, "eos_token_id": 2, "transformers_version": "5.0"}
TOKENIZER = {
    "model": {"vocab": {"a": 0, "b": 1}},
    "added_tokens": [{"id": 5, "content": "<|im_end|>"}, {"id": 2, "content": "</s>"}],
}
Lie = Callable[[dict[str, Any]], Any]


def values(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


WEIGHTS = {"a.weight": values(4, 3), "b.weight": values(5, seed=1), "c.weight": values(2, 2, 2, seed=2)}


def write(folder: Path, weights: dict[str, NDArray[Any]] | None = None, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    save_file(weights if weights is not None else dict(WEIGHTS), folder / "model.safetensors")
    return folder


def shard(folder: Path) -> Path:
    """The same tensors in two files and an index."""
    names = {
        "model-00001-of-00002.safetensors": ["c.weight"],
        "model-00002-of-00002.safetensors": ["a.weight", "b.weight"],
    }
    for file, held in names.items():
        save_file({n: WEIGHTS[n] for n in held}, folder / file)
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {n: file for file, held in names.items() for n in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_raw(file: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize("sharded", [False, True])
def test_tensors_are_read_exactly(tmp_path: Path, sharded: bool) -> None:
    folder = write(tmp_path)
    source = Source.open(shard(folder) if sharded else folder)
    assert set(source.tensors) == set(WEIGHTS)
    for name, expected in WEIGHTS.items():
        found = source.tensor(name, expected.shape)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected)


def test_float16_is_widened(tmp_path: Path) -> None:
    half = values(7, 3).astype(np.float16)
    found = Source.open(write(tmp_path, {"w": half})).tensor("w", (7, 3))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, half.astype(np.float32))


def test_bfloat16_is_widened(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file as save_torch

    tensor = torch.tensor([[1.0, -2.5, 3.140625], [1e-38, 6e37, -0.0]]).to(torch.bfloat16)
    write(tmp_path)
    save_torch({"w": tensor}, tmp_path / "model.safetensors")
    found = Source.open(tmp_path).tensor("w", (2, 3))
    np.testing.assert_array_equal(found, tensor.float().numpy())
    assert np.signbit(found[1, 2])


def test_a_tensor_must_have_the_promised_name_and_shape(tmp_path: Path) -> None:
    source = Source.open(write(tmp_path))
    with pytest.raises(SourceError, match=r"no tensor 'd\.weight'"):
        source.tensor("d.weight", (1,))
    with pytest.raises(SourceError, match=r"'a.weight' has shape \(4, 3\), config.json says \(3, 4\)"):
        source.tensor("a.weight", (3, 4))


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    broken = values(4)
    broken[2] = np.nan
    with pytest.raises(SourceError, match="not finite"):
        Source.open(write(tmp_path, {"w": broken})).tensor("w", (4,))


def test_quantized_tensors_are_refused_by_dtype(tmp_path: Path) -> None:
    source = Source.open(write(tmp_path, {"w": np.ones((2, 2), np.int8)}))
    with pytest.raises(SourceError, match="is I8; ssmd reads BF16, F16, F32"):
        source.tensor("w", (2, 2))


LIES: dict[str, tuple[Lie, str]] = {
    "beyond the file": (lambda h: h["b"].update(data_offsets=[16, 40]), "do not fit"),
    "offsets swapped": (lambda h: h["b"].update(data_offsets=[24, 16]), "do not fit"),
    "overlap": (lambda h: h["b"].update(data_offsets=[8, 16]), "do not fit"),
    "shape too large": (lambda h: h["a"].update(shape=[1 << 40]), "do not fit"),
    "negative shape": (lambda h: h["a"].update(shape=[-2, -2]), "malformed"),
    "shape of floats": (lambda h: h["a"].update(shape=[2.0, 2.0]), "malformed"),
    "boolean offset": (lambda h: h["a"].update(data_offsets=[False, 16]), "malformed"),
    "negative offset": (lambda h: h["a"].update(data_offsets=[-16, 0]), "malformed"),
    "unknown dtype": (lambda h: h["a"].update(dtype="F31"), "malformed"),
    "dtype of another size": (lambda h: h["a"].update(dtype="F16"), "do not fit"),
    "no offsets": (lambda h: h["a"].pop("data_offsets"), "malformed"),
    "entry is a list": (lambda h: h.update(a=[]), "malformed"),
    "a gap": (lambda h: h.pop("a"), "do not fit"),
    "bytes that no tensor claims": (lambda h: h.pop("b"), "should have"),
    "very many dimensions": (lambda h: h["a"].update(shape=[1] * 10_000 + [4]), "malformed"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused(tmp_path: Path, lie: str) -> None:
    header: dict[str, Any] = {
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [16, 24]},
    }
    write(tmp_path)
    write_raw(tmp_path / "model.safetensors", header, bytes(24))
    assert Source.open(tmp_path).tensor("b", (2,)).tolist() == [0, 0]
    change, message = LIES[lie]
    change(header)
    write_raw(tmp_path / "model.safetensors", header, bytes(24))
    with pytest.raises(SourceError, match=message):
        Source.open(tmp_path)


ENTRY = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        struct.pack("<Q", 1 << 62) + b"{}",
        struct.pack("<Q", 100) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 3) + b"{x}",
        struct.pack("<Q", 2) + b"\xff\xfe",
        struct.pack("<Q", 2 * len(ENTRY) + 11) + b'{"a":' + ENTRY + b',"a":' + ENTRY + b"}" + bytes(4),
        struct.pack("<Q", 100_000) + b"[" * 100_000,
    ],
)
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(SourceError, match=r"model\.safetensors"):
        Source.open(tmp_path)


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    for length in (len(whole) - 1, len(whole) // 2, 9):
        file.write_bytes(whole[:length])
        with pytest.raises(SourceError):
            Source.open(tmp_path)


@pytest.mark.parametrize(
    "place", ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "x.bin", "..\\x.safetensors", 7]
)
def test_an_index_cannot_point_outside(tmp_path: Path, place: Any) -> None:
    folder = shard(write(tmp_path / "in"))
    write(tmp_path)
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "x.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a.weight": place}}))
    with pytest.raises(SourceError, match="no plain safetensors name"):
        Source.open(folder)


def test_an_index_that_lies_is_refused(tmp_path: Path) -> None:
    folder = shard(write(tmp_path))
    index = folder / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    whole["weight_map"]["d.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(whole))
    with pytest.raises(SourceError, match="does not hold it"):
        Source.open(folder)
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(SourceError, match="which is missing"):
        Source.open(folder)


def test_pickles_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(SourceError, match=r"pytorch_model\.bin, a pickle.*save_pretrained"):
        Source.open(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    (write(tmp_path) / name).unlink()
    with pytest.raises(SourceError, match=name.replace(".", r"\.")):
        Source.open(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00", "[" * 100_000])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_files_that_are_not_json_objects_are_refused(tmp_path: Path, name: str, text: str) -> None:
    (write(tmp_path) / name).write_text(text)
    with pytest.raises(SourceError):
        Source.open(tmp_path)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="not a folder"):
        Source.open(tmp_path / "nowhere")


def test_stop_tokens_are_those_of_generation_and_tokenizer(tmp_path: Path) -> None:
    folder = write(tmp_path)
    assert Source.open(folder).stop_tokens == (2,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 4]}')
    assert Source.open(folder).stop_tokens == (1, 4)
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im_end|>"}, "bos_token": "</s>"}')
    source = Source.open(folder)
    assert source.stop_tokens == (1, 4, 5)
    assert source.special_tokens == {"eos": "<|im_end|>", "bos": "</s>"}
    for wrong in ("-1", "true", '"2"', "[1, null]", "{}"):
        (folder / "generation_config.json").write_text(f'{{"eos_token_id": {wrong}}}')
        with pytest.raises(SourceError, match="eos_token_id"):
            Source.open(folder)


def test_stop_tokens_of_a_nested_config(tmp_path: Path) -> None:
    """As in transformers: config.json's own field goes before the one in its `text_config`."""
    folder = write(tmp_path)
    for fields, expected in (
        ({"text_config": {"eos_token_id": 3}}, (3,)),
        ({"text_config": {"eos_token_id": [3, 4]}, "eos_token_id": None}, (3, 4)),
        ({"text_config": {"eos_token_id": 3}, "eos_token_id": 2}, (2,)),
        ({"text_config": {"hidden_size": 8}}, ()),
        ({"text_config": "qwen"}, ()),
    ):
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", **fields}))
        assert Source.open(folder).stop_tokens == expected
    (folder / "config.json").write_text('{"model_type": "llama", "text_config": {"eos_token_id": "2"}}')
    with pytest.raises(SourceError, match="eos_token_id is '2'"):
        Source.open(folder)


def test_chat_template_places(tmp_path: Path) -> None:
    folder = write(tmp_path)
    settings = folder / "tokenizer_config.json"
    assert Source.open(folder).chat_template is None
    settings.write_text(json.dumps({"chat_template": "plain"}))
    assert Source.open(folder).chat_template == "plain"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    settings.write_text(json.dumps({"chat_template": named}))
    assert Source.open(folder).chat_template == "d"
    (folder / "chat_template.jinja").write_text("file")
    assert Source.open(folder).chat_template == "file"
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(SourceError, match="chat template"):
        Source.open(folder)
    (folder / "chat_template.jinja").unlink()
    for wrong in (7, named[:1], [3]):
        settings.write_text(json.dumps({"chat_template": wrong}))
        with pytest.raises(SourceError, match="chat template"):
            Source.open(folder)


def test_lineage_is_what_the_model_computes(tmp_path: Path) -> None:
    lineage = Source.open(write(tmp_path / "a")).lineage
    assert len(lineage) == 64
    other = shard(write(tmp_path / "b", transformers_version="6.1", torch_dtype="bfloat16", _name_or_path="/home/me"))
    (other / "chat_template.jinja").write_text("another")
    (other / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert Source.open(other).lineage == lineage

    def changed(**weights: NDArray[Any]) -> str:
        return Source.open(write(tmp_path / "c", {**WEIGHTS, **weights})).lineage

    assert Source.open(write(tmp_path / "c")).lineage == lineage
    one_bit = WEIGHTS["a.weight"].copy()
    one_bit.view(np.uint32)[1, 1] ^= 1
    others = {
        "value": changed(**{"a.weight": one_bit}),
        "shape": changed(**{"a.weight": WEIGHTS["a.weight"].reshape(3, 4)}),
        "swapped": changed(**{"a.weight": WEIGHTS["b.weight"], "b.weight": WEIGHTS["a.weight"]}),
        "one more": changed(d=values(1)),
        "config": Source.open(write(tmp_path / "d", rms_norm_eps=1e-4)).lineage,
    }
    assert len({lineage, *others.values()}) == 6
