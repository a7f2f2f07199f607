"""The JSON schemas of tests/data/schemas.json, as their writers make them: zod 4, zod 3, pydantic and MCP servers.

    benchmarks/schema_corpus.py [--write]     prints how many there are of each, and writes the file

The packages come from npm, into a temporary folder: about 100 MB. It takes Node. Descriptions are left out. The tools
of agents are written anew here, after the shapes that they send.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import re
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NotRequired

import pydantic
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from typing_extensions import TypedDict

FILE = Path(__file__).parents[1] / "tests" / "data" / "schemas.json"
PACKAGES = ("zod@4.6.7", "zod3@npm:zod@3.25.76", "zod-to-json-schema@3.25.2")
MCP = "@modelcontextprotocol/server-"
SERVERS: dict[str, tuple[str, str, tuple[str, ...]]] = {  # by name: package, program, arguments
    **{
        name: (f"{MCP}{name}@2026.8.31", f"{MCP}{name}/dist/index.js", ("/tmp",) if name == "filesystem" else ())
        for name in ("filesystem", "everything", "memory", "sequential-thinking")
    },
    "playwright": ("@playwright/mcp@0.0.83", "@playwright/mcp/cli.js", ("--caps=vision,pdf",)),
}
Schema = dict[str, Any]


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: bool


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str


class Tabby(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: bool = True


class Node(BaseModel):
    value: str
    children: list[Node] = []


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: str


class Shut(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: str


class Record(TypedDict):
    a: str
    b: NotRequired[bool]


class Pair(NamedTuple):
    a: str
    b: bool


@dataclasses.dataclass
class Point:
    a: str
    b: bool = True


class And(BaseModel):
    op: Literal["and"]
    of: list[Annotated[And | Leaf, Field(discriminator="op")]]


class Leaf(BaseModel):
    op: Literal["leaf"] = "leaf"
    v: bool


class Person(BaseModel):
    """A person with everything at once."""

    name: str
    age: int | None = None
    tags: set[str] = set()
    born: datetime.date
    pets: list[Annotated[Cat | Dog, Field(discriminator="kind")]]
    boss: Person | None = None
    extra: dict[str, Any] = {}


PYDANTIC = (
    *("AnyUrl", "AwareDatetime", "Base64Bytes", "Base64Str", "Base64UrlStr", "ByteSize", "DirectoryPath", "FilePath"),
    *("FileUrl", "FiniteFloat", "FutureDate", "HttpUrl", "ImportString", "IPvAnyAddress", "Json", "JsonValue"),
    *("NaiveDatetime", "NonPositiveFloat", "PastDatetime", "PositiveInt", "PostgresDsn", "SecretBytes", "SecretStr"),
    *("SocketPath", "StrictInt", "UUID4"),
)
TYPES: dict[str, Any] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "none": type(None),
    "any": Any,
    "object": object,
    "bytes": bytes,
    "constr": Annotated[str, StringConstraints(min_length=2, max_length=5, pattern=r"^[a-z\-_/]+$", to_lower=True)],
    "conint": Annotated[int, Field(ge=0, lt=100, multiple_of=5)],
    "confloat": Annotated[float, Field(gt=0, le=1)],
    "decimal": decimal.Decimal,
    "condecimal": Annotated[decimal.Decimal, Field(max_digits=5, decimal_places=2)],
    "date": datetime.date,
    "datetime": datetime.datetime,
    "time": datetime.time,
    "timedelta": datetime.timedelta,
    "uuid": uuid.UUID,
    "path": pathlib.Path,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "ip network": ipaddress.IPv4Network,
    "ip interface": ipaddress.IPv6Interface,
    "re.Pattern": re.Pattern,
    **{name: getattr(pydantic, name) for name in PYDANTIC},
    "json of a list": pydantic.Json[list[int]],
    "enum": Colour,
    "int enum": Level,
    "literal": Literal["a", 1, None],
    "list": list[str],
    "list of any": list,
    "conlist": Annotated[list[bool], Field(min_length=1, max_length=3)],
    "tuple": tuple[str, bool],
    "tuple of any length": tuple[bool, ...],
    "set": set[str],
    "frozenset": frozenset[bool],
    "deque": collections.deque[bool],
    "sequence": Sequence[bool],
    "iterable": Iterable[bool],
    "dict": dict[str, bool],
    "dict of any": dict,
    "dict by int": dict[int, bool],
    "dict by enum": dict[Colour, bool],
    "dict by literal": dict[Literal["x", "y"], bool],
    "dict by uuid": dict[uuid.UUID, bool],
    "dict by pattern": dict[Annotated[str, StringConstraints(pattern="^k[0-9]$")], bool],
    "dict by length": dict[Annotated[str, StringConstraints(min_length=2, max_length=3)], bool],
    "dict by date": dict[datetime.date, bool],
    "mapping": Mapping[str, bool],
    "counter": collections.Counter[str],
    "condict": Annotated[dict[str, bool], Field(min_length=1, max_length=2)],
    "defaultdict": collections.defaultdict[str, bool],
    "optional": str | None,
    "union": int | str | None,
    "union of models": Cat | Dog,
    "discriminated": Annotated[Cat | Dog, Field(discriminator="kind")],
    "discriminated by defaults": Annotated[Tabby | Dog, Field(discriminator="kind")],
    "discriminated, recursive": Annotated[And | Leaf, Field(discriminator="op")],
    "typed dict": Record,
    "named tuple": Pair,
    "dataclass": Point,
    "model": Cat,
    "recursive": Node,
    "extra allowed": Open,
    "extra forbidden": Shut,
    "root model": pydantic.RootModel[list[Cat]],
    "complex": complex,
    "alias": Annotated[str, Field(alias="the alias")],
    "default factory": Annotated[str, Field(default_factory=str)],
    "schema extra": Annotated[str, Field(json_schema_extra={"uniqueItems": False, "x-y": 1})],
    "annotated": Annotated[str, Field(deprecated=True, title="T", description="d", examples=["a"])],
}


def tool(required: Sequence[str] = (), **properties: Any) -> Schema:
    """Return the parameters of a tool. A name stands for a type, or for a list of such."""
    named = {name: {"type": one} if isinstance(one, str) else one for name, one in properties.items()}
    return {"type": "object", "properties": named, "required": list(required), "additionalProperties": False}


TODO = tool(
    ("content", "status"), content={"type": "string", "minLength": 1}, status={"enum": ["pending", "completed"]}
)
OPTION = tool(("label",), label="string", description="string")
QUESTION = tool(
    ("question", "options"),
    question="string",
    header={"type": "string", "maxLength": 12},
    options={"type": "array", "items": OPTION, "minItems": 2, "maxItems": 4},
    multiSelect={"type": "boolean", "default": False},
)
AGENTS: dict[str, Schema] = {
    "bash": tool(("command",), command="string", timeout={"type": "number", "maximum": 600000}, background="boolean"),
    "edit": tool(
        ("path", "old", "new"), path="string", old="string", new="string", all={"type": "boolean", "default": False}
    ),
    "read": tool(
        ("path",),
        path="string",
        offset={"type": "integer", "minimum": 0},
        limit={"type": "integer", "exclusiveMinimum": 0},
    ),
    "grep": tool(
        ("pattern",), pattern="string", **{"-i": "boolean", "-A": "number"}, mode={"enum": ["content", "count"]}
    ),
    "paths": tool((), paths={"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
    "todo": tool(("todos",), todos={"type": "array", "items": TODO}),
    "ask": tool(("questions",), questions={"type": "array", "items": QUESTION, "minItems": 1, "maxItems": 4}),
    "metadata": tool(
        ("id",),
        id={"type": "string", "pattern": "^[a-z0-9-]+$"},
        metadata={"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
    ),
    "range": tool(
        ("path",), path="string", range={"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
    ),
    "fetch": tool(
        ("url",), url={"type": "string", "format": "uri"}, format={"enum": ["text", "html"], "default": "text"}
    ),
    "message": tool(
        ("to", "message"),
        to="string",
        message={"anyOf": [{"type": "string"}, {"type": "object", "additionalProperties": {}}]},
    ),
    "patch": tool(
        ("changes",), changes={"type": "object", "additionalProperties": tool(("kind",), kind={"const": "add"})}
    ),
    "nothing": {"type": "object", "properties": {}},
    "nothing, draft 7": {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": {}},
    "nullable": tool(
        ("a", "b"), a={"type": ["string", "null"]}, b={"type": ["array", "null"], "items": {"type": "number"}}
    ),
}


def written_by_pydantic() -> dict[str, Schema]:
    """Return the schema of a model with a field of each type."""
    found: dict[str, Schema] = {"everything": Person.model_json_schema()}
    for name, kind in TYPES.items():
        model = pydantic.create_model("Model", value=(kind, ...))
        for mode in ("validation", "serialization"):
            schema = model.model_json_schema(mode=mode)
            if mode == "validation" or schema != found[name]:
                found[name if mode == "validation" else f"{name}, serialized"] = schema
    return found


def published_by(program: Path, arguments: Sequence[str]) -> dict[str, Schema]:
    """Return the parameters of the tools of an MCP server, asked over its standard input."""
    command = ["node", str(program), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        told = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "corpus", "version": "1"}}
        asked: list[dict[str, Any]] = [
            {"id": 1, "method": "initialize", "params": told},
            {"method": "notifications/initialized"},
        ]
        for message in (*asked, {"id": 2, "method": "tools/list"}):
            server.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
            server.stdin.flush()
        answers = (json.loads(line) for line in server.stdout if line.startswith("{"))
        tools = next(answer["result"]["tools"] for answer in answers if answer.get("id") == 2)
        server.terminate()
    return {one["name"]: one["inputSchema"] for one in tools}


def plain(value: Any, *, names: bool = False) -> Any:
    """Return a schema without descriptions. names: it is an object whose keys are names of properties."""
    if isinstance(value, list):
        return [plain(one) for one in value]
    if not isinstance(value, dict):
        return value
    kept = {key: one for key, one in value.items() if names or key != "description"}
    return {key: plain(one, names=key in ("properties", "$defs") and not names) for key, one in kept.items()}


def corpus() -> dict[str, dict[str, Schema]]:
    """Return all schemas, by their writer and name."""
    with tempfile.TemporaryDirectory() as folder:
        packages = [*PACKAGES, *(package for package, _, _ in SERVERS.values())]
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--prefix", folder, *packages], check=True)
        program = shutil.copy(Path(__file__).with_suffix(".mjs"), folder)
        done = subprocess.run(["node", program], capture_output=True, text=True, check=True)
        found: dict[str, dict[str, Schema]] = json.loads(done.stdout)
        for name, (package, path, arguments) in SERVERS.items():
            found[package.rpartition("@")[0]] = published_by(Path(folder, "node_modules", path), arguments)
            print(f"{name} answered")
    return {**found, f"pydantic {pydantic.VERSION}": written_by_pydantic(), "agents": AGENTS}


def main() -> None:
    """Print the numbers of schemas, and write the file if asked to."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--write", action="store_true")
    found = {writer: {name: plain(one) for name, one in many.items()} for writer, many in corpus().items()}
    for writer, many in found.items():
        print(f"{writer:<48} {len(many):>4}")
    if arguments.parse_args().write:
        groups = (
            json.dumps(writer) + ": {\n" + ",\n".join(f"{json.dumps(n)}: {json.dumps(one)}" for n, one in many.items())
            for writer, many in found.items()
        )
        FILE.write_text("{\n" + "\n},\n".join(groups) + "\n}\n}\n", "utf-8")


if __name__ == "__main__":
    main()
