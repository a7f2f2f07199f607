"""Sampling defaults: those of a generation config and of an artifact's file, and those that the catalogue has."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from ssmd.families.registry import family_of
from ssmd.model.artifact import Manifest, seal
from ssmd.model.defaults import (
    BREAKERS,
    CATALOGUE,
    FILE,
    MAX_BYTES,
    Default,
    defaults_of,
    of_generation_config,
    parse,
    read,
    write,
)
from ssmd.refit import catalog

SOURCE = "generation_config.json of acme/tiny"


def values_of(**fields: Any) -> dict[str, Any]:
    found, wrong = of_generation_config(fields, "acme/tiny")
    assert not wrong
    assert all(default.source.startswith(SOURCE) for default in found.values())
    return {name: default.value for name, default in found.items()}


def manifest(folder: Path, **changed: Any) -> Manifest:
    folder.mkdir()
    for file in ("tokenizer.json", "golden.safetensors"):
        (folder / file).write_text("{}")
    fields = {
        "name": "tiny",
        "family": "llama",
        "lineage": "a" * 64,
        "runtime": "litert",
        "device_class": "cpu",
        "quantization": "f32",
        "quantization_recipe": {},
        "buckets": [16],
        "context": 512,
        "vocabulary": 49152,
        "special_tokens": {},
        "stop_tokens": [2],
        "state": [{"name": "key_0", "kind": "key", "layer": 0, "shape": [2, 16], "dtype": "float32"}],
        "builders": {},
        **changed,
    }
    return seal(folder, fields).manifest


def test_a_generation_config_names_the_defaults() -> None:
    said = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
    assert values_of(**said, do_sample=True, eos_token_id=[2, 0]) == said
    assert values_of(**said, max_new_tokens=512) == {**said, "max_tokens": 512}
    assert values_of(eos_token_id=2, temperature=None) == {}


def test_do_sample_false_is_temperature_0() -> None:
    assert values_of(do_sample=False, top_p=0.9) == {"temperature": 0.0, "top_p": 0.9}
    assert values_of(do_sample=False, temperature=0.7)["temperature"] == 0.0
    assert values_of(temperature=0.7)["temperature"] == 0.7


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("temperature", "NaN"),
        ("temperature", "Infinity"),
        ("temperature", "-0.1"),
        ("temperature", "1e999"),
        ("temperature", '"0.7"'),
        ("temperature", "true"),
        ("temperature", "[0.7]"),
        ("top_p", "1.5"),
        ("top_k", "-1"),
        ("top_k", "20.5"),
        ("top_k", "9" * 400),
        ("min_p", "{}"),
        ("repetition_penalty", "0"),
        ("repetition_penalty", "1e9"),
        ("max_new_tokens", "0"),
        ("max_new_tokens", "20"),
        ("max_new_tokens", "1e10"),
    ],
)
def test_a_value_that_cannot_be_is_left_out_by_name(name: str, text: str) -> None:
    found, wrong = of_generation_config(
        json.loads(f'{{"{name}": {text}, "top_p": 0.9}}' if name != "top_p" else f'{{"top_p": {text}}}'), "x"
    )
    assert found.keys() <= {"top_p"} - {name}
    assert len(wrong) == 1
    assert wrong[0].startswith(f"generation_config.json: {name} is ")
    assert len(wrong[0]) < 250


def test_defaults_are_written_and_read_again(tmp_path: Path) -> None:
    defaults = {
        "temperature": Default(0.6, SOURCE),
        "top_k": Default(20, SOURCE),
        BREAKERS: Default(("\n", "."), SOURCE),
    }
    write(tmp_path, defaults)
    assert read(tmp_path) == defaults
    assert [file.name for file in tmp_path.iterdir()] == [FILE]
    write(tmp_path / "other", {})  # which is not even there
    assert read(tmp_path / "other") == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{" * 100_000,
        '"temperature"',
        '{"temperature": 0.5}',
        '{"temperature": {"value": 0.5}}',
        '{"temperature": {"value": NaN, "source": "x"}}',
        '{"temperature": {"value": 0.5, "source": 7}}',
        '{"temperature": {"value": 0.5, "source": "\\u001b[2J"}}',
        json.dumps({"temperature": {"value": 0.5, "source": "x" * 201}}),
        '{"warmth": {"value": 0.5, "source": "x"}}',
        '{"dry_sequence_breakers": {"value": 3, "source": "x"}}',
        '{"dry_sequence_breakers": {"value": [""], "source": "x"}}',
        json.dumps({"dry_sequence_breakers": {"value": ["x"] * 17, "source": "x"}}),
        json.dumps({"dry_sequence_breakers": {"value": ["x" * 41], "source": "x"}}),
        " " * (MAX_BYTES + 1),
    ],
    ids=range(16),
)
def test_a_file_that_lies_is_ignored_with_a_warning(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).write_text(text)
    with caplog.at_level(logging.WARNING, "ssmd.model.defaults"):
        assert read(tmp_path) == {}
    assert str(tmp_path / FILE) in caplog.text
    assert "\x1b" not in caplog.text


def test_a_wrong_entry_leaves_the_others(tmp_path: Path) -> None:
    good = {"value": 0.9, "source": SOURCE}
    (tmp_path / FILE).write_text(json.dumps({"top_p": good, "top_k": {"value": -3, "source": SOURCE}}))
    assert read(tmp_path) == {"top_p": Default(0.9, SOURCE)}


def test_a_whole_number_may_be_written_20_0(tmp_path: Path) -> None:
    assert values_of(top_k=20.0, max_new_tokens=512.0) == {"top_k": 20, "max_tokens": 512}
    (tmp_path / FILE).write_text(json.dumps({"top_k": {"value": 20.0, "source": SOURCE}}))
    assert [type(default.value) for default in read(tmp_path).values()] == [int]
    assert parse("top_k=20.0") == ("top_k", 20)
    for wrong in ("top_k=20.5", "top_k=inf", "top_k=true"):
        with pytest.raises(ValueError, match="expected a whole number"):
            parse(wrong)


def test_an_artifact_without_a_file_has_the_catalogues(tmp_path: Path) -> None:
    named = [manifest(tmp_path / name, name=name) for name in ("smollm2", "SmolLM2-135M-Instruct")]
    for one in named:
        assert defaults_of(one, tmp_path / one.name) == CATALOGUE["smollm2"].values
    other = manifest(tmp_path / "other", name="smollm2", vocabulary=300)
    assert defaults_of(other, tmp_path / "other") == {}


def test_an_artifacts_file_wins_over_the_catalogue(tmp_path: Path) -> None:
    one = manifest(tmp_path / "smollm2", name="smollm2")
    write(tmp_path / "smollm2", {"temperature": Default(0.7, SOURCE)})
    found = defaults_of(one, tmp_path / "smollm2")
    assert found == {**CATALOGUE["smollm2"].values, "temperature": Default(0.7, SOURCE)}


def test_defaults_are_no_part_of_a_build(tmp_path: Path) -> None:
    before = manifest(tmp_path / "one")
    write(tmp_path / "one", {"temperature": Default(0.7, SOURCE)})
    assert Manifest.model_validate_json((tmp_path / "one" / "artifact.json").read_bytes()).build == before.build
    assert FILE not in before.files


def test_the_catalogue_is_of_models_that_have_graphs() -> None:
    for name, known in CATALOGUE.items():
        graph = next(graph for graph in catalog.shipped() if graph.header.name == name)
        family = family_of(graph.header.config)
        assert known.origin == graph.header.origin
        assert (known.family, known.vocabulary) == (family.name, family.parse(graph.header.config).vocabulary)
        for option, default in known.values.items():
            assert re.match(r"the model's card|generation_config\.json of |benchmarks/", default.source), (
                "where it is from"
            )
            if option != BREAKERS:
                assert parse(f"{option}={default.value}") == (option, default.value)


def test_the_page_on_models_has_the_catalogue() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text("utf-8")
    section = page.partition("## Sampling of each model")[2].partition("\n## ")[0]
    found = [line for line in section.splitlines() if line.startswith("| `")]
    assert found == [row for name in sorted(CATALOGUE) for row in rows(name)]


def rows(name: str) -> list[str]:
    """The rows of a model in that page's table, one of each source."""
    values = CATALOGUE[name].values
    said = {source: [] for source in (default.source for default in values.values())}  # type: dict[str, list[str]]
    for option, default in values.items():
        said[default.source].append(f"{option} {default.text}")
    return [f"| `{name}` | {', '.join(each)} | {source} |" for source, each in said.items()]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("temperature", "not NAME=VALUE"),
        ("temprature=1", "did you mean temperature?"),
        ("seed=1", "there are: temperature, top_p"),
        ("temperature=hot", "'hot', expected a number from 0 to 2"),
        ("temperature=nan", "expected a number from 0 to 2"),
        ("top_k=1.5", "expected a whole number of 0 or more"),
        ("top_p=", "expected a number from 0 to 1"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_in_words(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("?", r"\?")):
        parse(text)
