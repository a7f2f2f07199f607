"""A plan: what it refuses, and what follows from its layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ssmd.model.plan import MAX_BYTES, Attention, Experts, Layer, Mlp, Plan, PlanError
from ssmd.model.rope import LinearScaling, Llama3Scaling, ProportionalScaling, Rope, Scaling, YarnScaling

ATTENTION = Attention(heads=4, kv_heads=2, head_dim=6, bias=False, qk_eps=None, rotated=4)
EXPERTS = Experts(count=5, chosen=2, intermediate=4, sigmoid=True, bias=True, normed=True)
MLP = Mlp(intermediate=10, bias=True, activation="relu2")


STRETCHED = {
    "kind": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def plan(*layers: Layer, rope: Rope | None = None) -> Plan:
    return Plan(hidden=8, vocabulary=20, eps=1e-5, embedding_scale=1.0, tied=True, rope=rope, layers=layers)


def test_a_layer_of_one_part_has_one_norm() -> None:
    both, mixer, mlp = (Layer(mixers=m, mlp=f) for m, f in (((ATTENTION,), MLP), ((ATTENTION,), None), ((), MLP)))
    assert (both.norms, mixer.norms, mlp.norms) == (("norm1", "norm2"), ("norm",), ("norm",))
    made = plan(both, mlp).parameters()
    assert {n: s for n, s in made.items() if n.startswith("layer1")} == {
        "layer1_norm": (8,),
        "layer1_up": (10, 8),
        "layer1_down": (8, 10),
        "layer1_up_bias": (10,),
        "layer1_down_bias": (8,),
    }
    assert [t.name for t in plan(mlp, both).spec("float16").tensors] == ["key_1", "value_1"]


def test_tables_are_made_where_a_layer_rotates() -> None:
    tables = plan(Layer(mixers=(ATTENTION,), mlp=None), rope=Rope(100.0)).tables(3)
    assert tables is not None
    assert [t.shape for t in tables] == [(3, 2), (3, 2)]
    assert plan(Layer(mixers=(), mlp=MLP), rope=Rope(100.0)).tables(3) is None


def test_a_plan_without_experts_is_written_as_before_them(tmp_path: Path) -> None:
    """So its bytes, and an artifact that contains them, stay those of an older build."""
    dense, routed = Layer(mixers=(ATTENTION,), mlp=MLP), Layer(mixers=(ATTENTION,), mlp=None, experts=EXPERTS)
    assert "experts" not in plan(dense).model_dump_json()
    made = plan(dense, routed)
    (tmp_path / "plan.json").write_text(made.model_dump_json())
    assert Plan.open(tmp_path / "plan.json") == made
    assert made.experts == (EXPERTS,)
    assert routed.norms == ("norm1", "norm2")
    assert made.parameters()["layer1_experts_down"] == (5, 8, 4)


def test_experts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValidationError, match="6 experts of 5 cannot be chosen"):
        Experts(**{**dict(EXPERTS), "chosen": 6})
    with pytest.raises(ValidationError, match="an MLP of relu2 cannot stand beside experts"):
        Layer(mixers=(ATTENTION,), mlp=MLP, experts=EXPERTS)


def test_a_layer_of_no_part_is_refused() -> None:
    with pytest.raises(ValidationError, match="neither a mixer nor an MLP"):
        Layer(mixers=(), mlp=None)


@pytest.mark.parametrize(
    "scaling",
    [LinearScaling(2.0), Llama3Scaling(8.0, 1.0, 4.0, 64), YarnScaling(4.0, 64, 1.1), ProportionalScaling(1, 2.0)],
)
def test_ropes_are_read_as_they_were_written(scaling: Scaling, tmp_path: Path) -> None:
    made = plan(Layer(mixers=(ATTENTION,), mlp=MLP), rope=Rope(100.0, scaling))
    (tmp_path / "plan.json").write_text(made.model_dump_json())
    assert Plan.open(tmp_path / "plan.json") == made


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"vocabulary": 0}, "vocabulary: Input should be greater than 0"),
        ({"eps": "small"}, "eps: Input should be a valid number"),
        ({"layers": []}, "layers: Tuple should have at least 1 item"),
        ({"more": 1}, "more: Extra inputs"),
        ({"rope": {"theta": 0}}, r"plan\.json: rope: theta is 0\.0, expected a positive number; build"),
        ({"rope": {"theta": float("nan")}}, "theta is nan"),
        ({"rope": {"theta": 1e4, "scaling": STRETCHED | {"factor": -1}}}, r"rope\.scaling\.llama3: factor is -1\.0"),
        ({"rope": {"theta": 1e4, "scaling": STRETCHED | {"high_freq_factor": 1}}}, "low_freq_factor is 1"),
        ({"rope": {"theta": 1e4, "scaling": STRETCHED | {"low_freq_factor": 1e999}}}, "low_freq_factor is inf"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    file, whole = tmp_path / "plan.json", plan(Layer(mixers=(ATTENTION,), mlp=MLP), rope=Rope(100.0))
    file.write_text(whole.model_dump_json())
    assert Plan.open(file) == whole
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(PlanError, match=said) as failure:
        Plan.open(file)
    assert "\n" not in str(failure.value)


def test_a_file_too_large_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(plan(Layer(mixers=(ATTENTION,), mlp=MLP), rope=Rope(100.0)).model_dump_json() + " " * MAX_BYTES)
    with pytest.raises(PlanError, match=f"is larger than {MAX_BYTES} bytes"):
        Plan.open(file)


def test_layers_that_rotate_otherwise_are_refused() -> None:
    other = ATTENTION.model_copy(update={"rotated": 2})
    with pytest.raises(ValidationError, match=r"layers rotate different numbers of values, \[2, 4\]"):
        plan(Layer(mixers=(ATTENTION,), mlp=None), Layer(mixers=(other,), mlp=None))


def test_layers_with_a_window_may_rotate_otherwise() -> None:
    """If they have tables of their own, each of which is as wide as its layers say."""
    near = Attention.model_validate({**dict(ATTENTION), "rotated": 2, "window": 8})
    layers = tuple(Layer(mixers=(m,), mlp=None) for m in (ATTENTION, near))
    with pytest.raises(ValidationError, match="layers rotate different numbers"):
        plan(*layers, rope=Rope(100.0))
    made = Plan.model_validate({**dict(plan(layers[0], rope=Rope(100.0))), "layers": layers, "window_rope": Rope(9.0)})
    assert (made.rotated, made.window_rotated) == (4, 2)
    assert [t[0].shape for t in (made.tables(3), made.window_tables(3)) if t is not None] == [(3, 2), (3, 1)]
    with pytest.raises(ValidationError, match="layers rotate different numbers"):
        Plan.model_validate(
            {**dict(made), "layers": (*layers, Layer(mixers=(near.model_copy(update={"rotated": 4}),), mlp=None))}
        )


def test_the_state_of_a_window_has_a_row_less() -> None:
    """A token's own row is not in it. Its kind says that it is no cache, whatever the dtype of caches."""
    near = Attention.model_validate({**dict(ATTENTION), "window": 8})
    spec = plan(Layer(mixers=(near,), mlp=None)).spec("float16")
    assert [(t.kind, t.shape, t.dtype) for t in spec.tensors] == [
        (kind, (2, 7, 6), "float32") for kind in ("window_key", "window_value")
    ]
    for window in (0, 1, -5, 2.0, 1 << 30):
        with pytest.raises(ValidationError, match="window"):
            Attention.model_validate({**dict(ATTENTION), "window": window})


def test_sandwich_norms_stand_around_mixers_and_an_mlp() -> None:
    made = plan(Layer(mixers=(ATTENTION,), mlp=MLP, sandwich=True)).parameters()
    assert {n for n in made if "norm" in n} == {
        "norm",
        *(f"layer0_{n}" for n in ("norm1", "norm2", "post_norm1", "post_norm2")),
    }
    with pytest.raises(ValidationError, match="sandwich norms has mixers and an MLP"):
        Layer(mixers=(ATTENTION,), mlp=None, sandwich=True)
