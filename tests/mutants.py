"""Artifacts that rules make malformed, each from a seed. Their manifests list the right hashes, as an attacker's would.

A rule changes files, the manifest or the folder. Each seed is one mutant: the rules of a runtime take turns.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forging import change_bytes, change_json

from ssmd.model.artifact import GOLDEN, MANIFEST, build_hash, file_entry

LISTED = "tokenizer.json"  # a file that every artifact has
SPARSE = 1 << 36  # bytes
NUMBERS = (-1, 0, 1, 7, 255, 1 << 16, 1 << 24, (1 << 31) - 1, -(1 << 31), 0x7FFFFFF0, 0x40000000)  # int32
SIZES = (*(str(n) for n in NUMBERS), str(1 << 32), str((1 << 63) - 1), str(1 << 64), "-9223372036854775808", "x", "")
Change = Callable[[random.Random, Path], None]  # changes an artifact's folder, whose manifest is written after that


@dataclass(frozen=True)
class Mutant:
    """A malformed artifact. rule: the name of the rule that made it."""

    path: Path
    rule: str
    seed: int


def mutant(artifact: Path, out: Path, seed: int) -> Mutant:
    """Write the mutant of a seed to the folder `out`."""
    runtime = json.loads((artifact / MANIFEST).read_text())["runtime"]
    rules = [*RULES[runtime], *ANY]
    rule, rng = rules[seed % len(rules)], random.Random(f"{runtime} {seed}")
    shutil.copytree(artifact, out, copy_function=shutil.copyfile)
    rule(rng, out)
    return Mutant(out, rule.__name__, seed)


def reseal(folder: Path, change: Callable[[dict[str, Any]], object] = lambda whole: None) -> None:
    """Write the manifest of a folder anew, with the hashes of its files, and then with this change."""
    whole = json.loads((folder / MANIFEST).read_text())
    whole["files"] = {name: file_entry(folder / name).model_dump() for name in whole["files"]}
    change(whole)
    with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):  # no hash is right for such a one
        whole["build"] = build_hash(whole)
    (folder / MANIFEST).write_text(json.dumps(whole))


def rewrite(folder: Path, name: str, change: Callable[[bytearray], bytes | bytearray | None]) -> None:
    """Change the bytes of a file, and seal the folder."""
    data = bytearray((folder / name).read_bytes())
    made = change(data)
    (folder / name).write_bytes(data if made is None else made)
    reseal(folder)


# any runtime


def odd_manifest(rng: random.Random, folder: Path) -> None:
    """A value that is of another type, huge, not finite, missing or there twice."""
    reseal(folder, lambda whole: change_json(rng, whole))


def odd_numbers(rng: random.Random, folder: Path) -> None:
    numbers = (float("inf"), float("nan"), 10**400, 1 << 64, 1 << 40, -1, 0, 1.5, True, "9" * 5000)

    def change(whole: dict[str, Any]) -> None:
        tensor = rng.choice(whole["state"])
        ways: list[tuple[Any, Any]] = 3 * [(tensor, "layer"), (tensor["shape"], 0), (tensor["shape"], -1)]
        ways += [(whole, "context"), (whole, "vocabulary"), (whole["buckets"], 0), (whole["buckets"], -1)]
        ways += [(whole["files"][LISTED], "size")]
        container, key = rng.choice(ways)
        container[key] = rng.choice(numbers)

    reseal(folder, change)


def other_interface(rng: random.Random, folder: Path) -> None:
    """The manifest and the files disagree about the model's states, lengths or tokens."""

    def change(whole: dict[str, Any]) -> None:
        state = whole["state"]
        one = rng.choice(state)
        ways: list[Callable[[], object]] = [
            lambda: one.update(name="renamed_0"),
            lambda: state.remove(one),
            lambda: state.append({**one, "name": "more_9"}),
            lambda: one.update(shape=[2 * d for d in one["shape"]]),
            lambda: one.update(shape=[*one["shape"][::-1], 1]),
            lambda: one.update(shape=one["shape"][::-1]),
            lambda: one.update(dtype="float16" if one["dtype"] == "float32" else "float32"),
            lambda: one.update(kind=rng.choice(["conv", "ssm", "key", "value"])),
            lambda: whole.update(state=[{**one, "name": f"key_{i}"} for i in range(5000)]),
            lambda: whole.update(buckets=[16, 32]),
            lambda: whole.update(buckets=[16, 64, 1 << 20]),
            lambda: whole.update(context=rng.choice([16, 1 << 20]), tiers=[]),
            lambda: whole.update(vocabulary=rng.choice([383, 385, 1 << 20])),
            lambda: whole.update(runtime=rng.choice(["litert", "openvino", "wgpu", "coreml", "nosuch"])),
            lambda: whole.update(device_class=rng.choice(["gpu", "npu", "cpu", "nosuch"])),
            lambda: whole.update(quantization=rng.choice(["int8", "int4", "f16", "odd"])),
            lambda: whole.update(builders={"openvino": rng.choice(["9" * 5000, "9999.1", "x"])}),
            lambda: whole.update(conversion={"xamba": {"passes": {"actiba": 10**400}}}),
        ]
        rng.choice(ways)()

    reseal(folder, change)


def odd_golden(rng: random.Random, folder: Path) -> None:
    """Golden values that are damaged, or of which the header says something else."""

    def change(data: bytearray) -> bytes:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        if rng.random() < 0.5:
            return change_bytes(rng, bytes(data))
        change_json(rng, header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    rewrite(folder, GOLDEN, change)


def odd_folder(rng: random.Random, folder: Path) -> None:
    """Links, pipes, holes and folders in place of files."""
    name = rng.choice([n for n in json.loads((folder / MANIFEST).read_text())["files"] if n != MANIFEST])
    file = folder / name
    way = rng.randrange(6)
    if way < 4:
        file.unlink()
    if way == 0:
        file.symlink_to("/etc/passwd")
    elif way == 1:
        os.mkfifo(file)
    elif way == 2:
        file.mkdir()
    elif way == 3:
        file.symlink_to(file.name)
    elif way == 4:  # a hole, which takes no room on the disk and a minute to hash
        os.truncate(file, SPARSE)
        whole = json.loads((folder / MANIFEST).read_text())
        whole["files"][name]["size"] = SPARSE
        whole["build"] = build_hash(whole)
        (folder / MANIFEST).write_text(json.dumps(whole))
    else:
        (folder / MANIFEST).rename(folder / "elsewhere")
        (folder / MANIFEST).symlink_to(rng.choice(["/dev/zero", "/etc/passwd", MANIFEST]))


# LiteRT: a flatbuffer, then the large constants


MODEL = "model.tflite"


class Flatbuffer:
    """The places of a .tflite file's fields, to be overwritten where they stand."""

    def __init__(self, data: bytearray) -> None:
        from ai_edge_litert import schema_py_generated as schema

        self.data, self.model = data, schema.Model.GetRootAs(bytes(data), 0)

    def field(self, table: Any, index: int) -> int | None:
        """Return where the field of that number stands, or the offset that leads to it; None for a default."""
        offset = table._tab.Offset(4 + 2 * index)
        return table._tab.Pos + offset if offset else None

    def elements(self, table: Any, index: int) -> int | None:
        """Return where the elements of a vector or the letters of a text begin. The length is the 4 bytes before."""
        place = self.field(table, index)
        return None if place is None else place + int.from_bytes(self.data[place : place + 4], "little") + 4

    def put(self, place: int | None, number: int, width: int = 4) -> None:
        if place is not None:
            self.data[place : place + width] = (number % (1 << 8 * width)).to_bytes(width, "little")

    @property
    def end(self) -> int:
        """Where the constants begin that stand after the flatbuffer."""
        buffers = (self.model.Buffers(i) for i in range(self.model.BuffersLength()))
        return int(min((b.Offset() for b in buffers if b.Size() > 1), default=len(self.data)))


def cut_file(rng: random.Random, folder: Path) -> None:
    """A .tflite file that ends at a structure's border, or within one."""

    def change(data: bytearray) -> bytearray:
        end = Flatbuffer(data).end
        return data[: rng.choice([0, 4, 8, 12, 16, end - 1, end, end + 1, rng.randrange(end), len(data) - 1])]

    rewrite(folder, MODEL, change)


def flipped_header(rng: random.Random, folder: Path) -> None:
    def change(data: bytearray) -> None:
        for _ in range(rng.choice([1, 1, 4])):
            data[rng.randrange(96)] ^= 1 << rng.randrange(8)

    rewrite(folder, MODEL, change)


def odd_offsets(rng: random.Random, folder: Path) -> None:
    """Any four bytes of the flatbuffer: an offset, a length, a count, an index."""

    def change(data: bytearray) -> None:
        end = Flatbuffer(data).end
        for _ in range(rng.choice([1, 1, 2, 16])):
            at = rng.randrange(2, end // 4 - 1) * 4
            data[at : at + 4] = (rng.choice(NUMBERS) % (1 << 32)).to_bytes(4, "little")

    rewrite(folder, MODEL, change)


def odd_table(rng: random.Random, folder: Path) -> None:
    """One field of a table that is found by the schema: an index, a shape, a type, the place of a constant."""

    def change(data: bytearray) -> None:
        f = Flatbuffer(data)
        m, number = f.model, rng.choice(NUMBERS)
        graph = m.Subgraphs(rng.randrange(m.SubgraphsLength()))
        tensor = graph.Tensors(rng.randrange(graph.TensorsLength()))
        interface = graph.Tensors(rng.choice([*graph.InputsAsNumpy(), *graph.OutputsAsNumpy()]))
        operator = graph.Operators(rng.randrange(graph.OperatorsLength()))
        large = [b for b in map(m.Buffers, range(m.BuffersLength())) if b.Size() > 1]
        buffer, signature = rng.choice(large), m.SignatureDefs(rng.randrange(m.SignatureDefsLength()))
        kind = rng.randrange(16)
        shape, of_operator = f.elements(rng.choice([tensor, interface]), 0), f.elements(operator, rng.choice([1, 2]))
        if kind == 0 and shape is not None:
            f.put(shape, number)
        elif kind == 1 and shape is not None:
            f.put(shape - 4, rng.choice([0, 7, 9, 1 << 20, 1 << 30]))
        elif kind == 2:
            f.put(f.field(rng.choice([tensor, interface]), 1), rng.choice([0, 1, 2, 3, 5, 9, 17, 255]), 1)
        elif kind == 3:
            f.put(f.field(tensor, 2), rng.choice([0, 1, m.BuffersLength(), number]))
        elif kind == 4:
            f.put(of_operator, rng.choice([-1, graph.TensorsLength(), number]))
        elif kind == 5 and of_operator is not None:
            f.put(of_operator - 4, rng.choice([0, 1, 1 << 20, 1 << 30]))
        elif kind == 6:
            f.put(f.field(operator, 0), rng.choice([0, 1, m.OperatorCodesLength(), number]))
        elif kind == 7:
            code = m.OperatorCodes(rng.randrange(m.OperatorCodesLength()))
            f.put(f.field(code, rng.choice([0, 3])), rng.choice([32, 126, 127, 255]), 1)
        elif kind == 8:
            f.put(f.field(buffer, 1), rng.choice([len(data), len(data) - 4, 1 << 40, 1 << 63, 7]), 8)
        elif kind == 9:
            f.put(f.field(buffer, 2), rng.choice([len(data), 1 << 40, 1 << 63, 4, (1 << 64) - 1]), 8)
        elif kind == 10:
            f.put(f.field(signature, 4), rng.choice([m.SubgraphsLength(), number]))
        elif kind == 11:
            f.put(f.field(signature.Inputs(0), 1), rng.choice([graph.TensorsLength(), -1, number]))
        elif kind == 12:
            f.put(f.elements(graph, rng.choice([1, 2])), rng.choice([graph.TensorsLength(), -1, number]))
        elif kind == 13:
            f.put((f.elements(signature, rng.choice([0, 1])) or 4) - 4, rng.choice([0, 1, 1 << 20]))
        elif kind == 14:
            f.put(f.field(operator, 3), rng.randrange(128), 1)  # the options of another operator
        else:
            f.put(f.field(graph, rng.choice([0, 1, 2, 3])), number)

    rewrite(folder, MODEL, change)


def odd_names(rng: random.Random, folder: Path) -> None:
    """Inputs, outputs and signatures that are renamed, or have the name of another one."""

    def change(data: bytearray) -> None:
        f = Flatbuffer(data)
        signature = f.model.SignatureDefs(rng.randrange(f.model.SignatureDefsLength()))
        entry = rng.choice([signature.Inputs, signature.Outputs])
        one, other = entry(0), entry(1)
        way = rng.randrange(4)
        if way == 0:
            place, length = f.elements(one, 0), len(one.Name())
        elif way == 1:
            place, length = f.elements(signature, 2), len(signature.SignatureKey())
        elif way == 2:  # two of one name
            place, length = f.field(one, 0), 0
            there = f.elements(other, 0)
            if place is not None and there is not None:
                f.put(place, there - 4 - place)
        else:
            place, length = f.elements(one, 0), 0
            f.put(None if place is None else place - 4, rng.choice([0, 1 << 20, 1 << 31]))
        if place is not None and length:
            data[place : place + length] = rng.choice([b"x", b"\xff", b"\0", b"\x1b"]) * length

    rewrite(folder, MODEL, change)


# OpenVINO: a network in XML, and its constants


XML, BIN = "model.xml", "model.bin"
_BOMB = "".join(f'<!ENTITY l{i} "{f"&l{i - 1};" * 10}">' for i in range(1, 10))
DOCTYPES = (
    f'<!DOCTYPE net [<!ENTITY l0 "lol">{_BOMB}]>',
    '<!DOCTYPE net [<!ENTITY l9 SYSTEM "file:///etc/passwd">]>',
    '<!DOCTYPE net [<!ENTITY % l9 SYSTEM "http://127.0.0.1:9/x.dtd"> %l9;]>',
    '<!DOCTYPE net SYSTEM "file:///dev/zero">',
)


def _edited(folder: Path, change: Callable[[str], str | bytes]) -> None:
    text = (folder / XML).read_text()
    made = change(text)
    (folder / XML).write_bytes(made if isinstance(made, bytes) else made.encode())
    reseal(folder)


def _one(rng: random.Random, pattern: str, text: str) -> re.Match[str]:
    return rng.choice(list(re.finditer(pattern, text)))


def _replaced(found: re.Match[str], text: str, new: str, group: int = 0) -> str:
    return text[: found.start(group)] + new + text[found.end(group) :]


def cut_xml(rng: random.Random, folder: Path) -> None:
    """XML that ends at an element's border, or within one."""
    ends = r"</layer>|</layers>|</edges>|<edges>|</output>|<data |<net |\?>"
    _edited(
        folder, lambda text: text[: _one(rng, ends, text).end()] if rng.random() < 0.8 else text[: rng.choice([0, 1])]
    )


def odd_xml(rng: random.Random, folder: Path) -> None:
    """Entities that grow or lead elsewhere, another encoding, depth, zeros."""
    way = rng.randrange(8)

    def change(text: str) -> str | bytes:
        if way < 4:
            said = "&l9;" if way < 3 else ""
            return text.replace("?>", f"?>{DOCTYPES[way]}", 1).replace('name="model"', f'name="{said}"', 1)
        if way == 4:
            return text.encode("utf-16")
        if way == 5:
            return text.replace("<layers>", "<x>" * 200_000 + "</x>" * 200_000 + "<layers>", 1)
        if way == 6:
            return text.replace(
                "<layers>", '<xi:include xmlns:xi="http://www.w3.org/2001/XInclude" href="/etc/passwd"/><layers>', 1
            )
        at = rng.randrange(len(text))
        return text[:at] + "\0" * 5 + text[at:]

    _edited(folder, change)


def odd_attribute(rng: random.Random, folder: Path) -> None:
    """A number of an attribute that is huge, negative or no number."""
    pattern = r'\b(?:offset|size|shape|axis|from-layer|from-port|to-layer|to-port|id|version|num_splits)="([^"]*)"'
    _edited(folder, lambda text: _replaced(_one(rng, pattern, text), text, rng.choice(SIZES), 1))


def odd_constant(rng: random.Random, folder: Path) -> None:
    """The place, size, shape or type of a constant."""

    def change(text: str) -> str:
        found = _one(rng, r'<data element_type="(\w+)" shape="([^"]*)" offset="(\d+)" size="(\d+)"', text)
        group = rng.randrange(1, 5)
        if group == 1:
            new = rng.choice(["f64", "i4", "string", "u1", "f16", "i64", "nf4", "odd"])
        elif group == 2:
            new = rng.choice(["", "1", "-1", "1,1,1,1,1,1,1,1,1,1", "4294967296,4294967296", "1099511627776", "0", "?"])
        else:
            new = rng.choice(SIZES)
        return _replaced(found, text, new, group)

    _edited(folder, change)


def odd_network(rng: random.Random, folder: Path) -> None:
    """Layers and edges that are missing, there twice, in a circle, or of another kind; names of inputs and outputs."""
    layer = r"(?s)\t\t<layer .*?</layer>\n"

    def change(text: str) -> str:
        way = rng.randrange(10)
        if way == 0:
            return _replaced(_one(rng, layer, text), text, "")
        if way == 1:
            found = _one(rng, layer, text)
            return _replaced(found, text, 2 * found[0])
        if way == 2:
            return _replaced(_one(rng, r"\t\t<edge [^>]*/>\n", text), text, "")
        if way == 3:
            found = _one(rng, r"\t\t<edge [^>]*/>\n", text)
            return _replaced(found, text, 2 * found[0])
        if way == 4:  # a circle
            found = _one(rng, r'<edge from-layer="(\d+)" from-port="(\d+)" to-layer="(\d+)"', text)
            return _replaced(found, text, found[3], 1)
        if way == 5:
            kinds = ["Result", "Parameter", "Loop", "TensorIterator", "If", "FrameworkNode", "TopK", "x", ""]
            return _replaced(_one(rng, r'type="(\w+)" version="opset\d+"', text), text, rng.choice(kinds), 1)
        if way == 6:
            names = ["renamed", "tokens", "logits", "", "tokens,pos", "\x7f", "a" * 100_000]
            found = _one(rng, r'names="(tokens|pos|n_valid|key_0|value_0|logits|new_[^"]*)"', text)
            return _replaced(found, text, rng.choice(names), 1)
        if way == 7:
            shapes = ["", "?", "1", "?,?", "1,1048576", "384,384,384"]
            return _replaced(
                _one(rng, r'<data shape="([^"]*)" element_type="(?:i32|f32)"', text), text, rng.choice(shapes), 1
            )
        if way == 8:
            found = _one(rng, r'<data shape="[^"]*" element_type="(i32|f32)"', text)
            return _replaced(found, text, rng.choice(["i64", "f16", "string", "boolean", "odd"]), 1)
        return _replaced(
            _one(rng, r'version="(opset\d+)"', text), text, rng.choice(["opset1", "opset99", "extension", ""]), 1
        )

    _edited(folder, change)


def odd_bin(rng: random.Random, folder: Path) -> None:
    rewrite(folder, BIN, lambda data: change_bytes(rng, bytes(data)))


# wgpu: a plan, and weights in safetensors


PLAN, WEIGHTS = "plan.json", "weights.safetensors"


def odd_plan(rng: random.Random, folder: Path) -> None:
    def change(data: bytearray) -> bytes:
        whole = json.loads(data)
        for _ in range(rng.choice([1, 1, 2])):
            change_json(rng, whole)
        return json.dumps(whole).encode()

    rewrite(folder, PLAN, change)


def odd_sizes(rng: random.Random, folder: Path) -> None:
    """One number of the plan: a size, a count, a width, an epsilon."""

    def change(data: bytearray) -> bytes:
        found = _one(rng, r"(?<=[:\[,])\s*(\d+(?:\.\d+)?(?:e-?\d+)?)", data.decode())
        numbers = ["0", "-1", "1", "3", "1e400", "NaN", "Infinity", "1.5", "true", '"8"', "9" * 5000]
        numbers += [str(n) for n in (1 << 10, 1 << 24, 1 << 31, 1 << 62, 10**30)]
        return _replaced(found, data.decode(), rng.choice(numbers), 1).encode()

    rewrite(folder, PLAN, change)


def cut_text(rng: random.Random, folder: Path) -> None:
    rewrite(folder, PLAN, lambda data: change_bytes(rng, bytes(data)))


def odd_header(rng: random.Random, folder: Path) -> None:
    """The header of the weights: names, types, shapes and places."""

    def change(data: bytearray) -> bytes:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change_json(rng, header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    rewrite(folder, WEIGHTS, change)


def cut_weights(rng: random.Random, folder: Path) -> None:
    """Weights that end at a tensor's border, or within one; a header of another length."""

    def change(data: bytearray) -> bytes | bytearray:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        borders = [8 + length + end for entry in header.values() for end in entry.get("data_offsets", ())]
        if rng.random() < 0.6:
            return data[: rng.choice([0, 7, 8, 8 + length, *borders]) + rng.choice([0, 0, -1, 1])]
        data[:8] = rng.choice([0, length - 1, length + 1, len(data), 1 << 32, 1 << 63]).to_bytes(8, "little")
        return data

    rewrite(folder, WEIGHTS, change)


ANY: tuple[Change, ...] = (odd_manifest, odd_numbers, other_interface, odd_golden, odd_folder)
RULES: Mapping[str, tuple[Change, ...]] = {
    "litert": (cut_file, flipped_header, odd_offsets, odd_offsets, odd_table, odd_table, odd_table, odd_names),
    "openvino": (
        *(cut_xml, odd_xml, odd_attribute, odd_attribute, odd_constant, odd_constant, odd_network, odd_network),
        odd_bin,
    ),
    "wgpu": (odd_plan, odd_plan, odd_sizes, odd_sizes, cut_text, odd_header, odd_header, cut_weights),
}
