"""Wrong families must fail: every part of the re-authored modules is broken once, and the logits must show it.

What test_authoring.py holds against transformers is only worth as much as the errors that it would find.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import oracle
import pytest
import tiny
import torch
from numpy.typing import NDArray

from ssmd.authoring import attention, ops, scan
from ssmd.authoring.flat import FlatModule
from ssmd.authoring.host import Host
from ssmd.authoring.model import Model, author
from ssmd.families.registry import family_of
from ssmd.model.plan import Attention, Mamba2, Mlp
from ssmd.model.source import Source

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # transformers' own
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

TOLERANCE = 2e-5  # of the largest logit: what parity allows
SEEN = 50 * TOLERANCE  # a broken module is off by more
PREFILL, BUCKET, STEPS = 40, 64, 3  # tokens: both forms of every operation are used, and pads

Mutation = Callable[[FlatModule, pytest.MonkeyPatch], None]
Original = Callable[[str], tuple[Source, list[int], NDArray[np.float32]]]


def parameters(module: FlatModule, name: str) -> list[torch.Tensor]:
    """Return the parameters of a name: one without a layer, or those of every layer."""
    found = [p for n, p in module.named_parameters() if n in (name, f"{n.partition('_')[0]}_{name}")]
    assert found, f"no parameter is called {name}"
    return found


def changed(name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Mutation:
    """The parameters of a name, in every layer."""

    def mutate(module: FlatModule, _: pytest.MonkeyPatch) -> None:
        for p in parameters(module, name):
            p.copy_(function(p.clone()))

    return mutate


def dropped(name: str) -> Mutation:
    return changed(name, torch.zeros_like)


def unweighted(name: str) -> Mutation:
    return changed(name, torch.ones_like)


def wrapped(*names: str, place: Any = ops) -> Callable[[Callable[..., Any]], Mutation]:
    """Operations, by a function that gets the original and its arguments."""

    def made(function: Callable[..., Any]) -> Mutation:
        def mutate(_: FlatModule, patch: pytest.MonkeyPatch) -> None:
            for name in names:
                original = getattr(place, name)
                patch.setattr(place, name, lambda *args, original=original, **own: function(original, *args, **own))

        return mutate

    return made


def unnormed(name: str) -> Mutation:
    """A norm of which only the weight is left."""

    def mutate(module: FlatModule, patch: pytest.MonkeyPatch) -> None:
        weights = {id(p) for p in parameters(module, name)}
        forget = wrapped("rms_norm", "group_rms_norm")
        forget(lambda norm, x, w, *rest: x * w if id(w) in weights else norm(x, w, *rest))(module, patch)

    return mutate


def unnormed_alone(kind: type) -> Mutation:
    """Layers of one part of that kind, without their norm but for its weight."""

    def mutate(module: FlatModule, patch: pytest.MonkeyPatch) -> None:
        assert isinstance(module, Model)
        layers = enumerate(module.plan.layers)
        names = [f"layer{i}_norm" for i, layer in layers if isinstance(layer.mlp or layer.mixers[0], kind)]
        weights = {id(getattr(module, name)) for name in names}
        assert weights
        forget = wrapped("rms_norm")
        forget(lambda norm, x, w, *rest: x * w if id(w) in weights else norm(x, w, *rest))(module, patch)

    return mutate


def left_out(module: FlatModule, _: pytest.MonkeyPatch) -> None:
    """The first MLP that is a layer alone."""
    i = next(i for i in range(9) if hasattr(module, f"layer{i}_up"))
    for name, p in module.named_parameters():
        if name.startswith(f"layer{i}_down"):
            p.zero_()


def mixer(**fields: Any) -> Mutation:
    """Other Mamba-2 mixers than those of the plan."""

    def mutate(module: FlatModule, _: pytest.MonkeyPatch) -> None:
        assert isinstance(module, Model)
        assert any(isinstance(m, Mamba2) for m in module.plan.mixers)
        layers = tuple(
            layer.model_copy(update={"mixers": tuple(map(other, layer.mixers))}) for layer in module.plan.layers
        )
        module.plan = module.plan.model_copy(update={"layers": layers})

    def other(m: Any) -> Any:
        found = m.model_copy(update=fields) if isinstance(m, Mamba2) else m
        assert found != m or not isinstance(m, Mamba2)
        return found

    return mutate


def gate_for_x(module: FlatModule, patch: pytest.MonkeyPatch) -> None:
    assert isinstance(module, Model)
    n = next(m for m in module.plan.mixers if isinstance(m, Mamba2)).inner
    changed("in", lambda w: torch.cat([w[n : 2 * n], w[:n], w[2 * n :]]))(module, patch)


def next_group(ssd: Any, x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any, ssm: Any) -> Any:
    states = ssm.shape[-1]
    assert b.shape[-1] > states, "there is one group only"
    return ssd(x, dt, a, b.roll(states, -1), c, d, ssm)


def unactivated(conv: Any, *args: Any) -> Any:
    y, sequence = conv(*args)
    return y / torch.sigmoid(y), sequence


def mixed_heads(attention: Any, q: Any, *rest: Any) -> Any:
    """Query head i reads key/value head i mod G instead of i div R."""
    length, groups, each, size = q.shape
    assert groups > 1 < each, "there is nothing to mix"
    out, key, value = attention(q.reshape(length, each, groups, size).transpose(1, 2), *rest)
    out = out.reshape(length, groups, each, size).transpose(1, 2)
    return out.reshape(1, length, groups * each * size), key, value


def neighbours(rope: Any, x: Any, cos: Any, sin: Any) -> Any:
    """Pairs of neighbours are rotated instead of pairs across the halves."""
    rotated = 2 * cos.shape[-1]
    order = [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, x.shape[-1])]
    return rope(x[..., order], cos, sin)[..., np.argsort(order)]


def swapped(recurrence: Any, x: Any, dt: Any, a: Any, b: Any, c: Any, *rest: Any) -> Any:
    return recurrence(x, dt, a, c, b, *rest)


def weighed_with_bias(shares: Any, scores: Any, bias: Any, chosen: int, **form: bool) -> Any:
    """The bias changes the weights of the chosen experts, too."""
    assert bias is not None
    biased = torch.logit((torch.sigmoid(scores) + bias).clamp(1e-6, 1 - 1e-6))
    return shares(biased, None, chosen, **form)


def softmax_of_all(shares: Any, scores: Any, bias: Any, chosen: int, **form: bool) -> Any:
    every = torch.softmax(scores, -1)
    return torch.where(shares(scores, bias, chosen, **form) > 0, every, 0.0)


def without_shared(module: FlatModule, _: pytest.MonkeyPatch) -> None:
    """The MLP beside the experts."""
    assert isinstance(module, Model)
    layers = tuple(layer.model_copy(update={"mlp": None}) for layer in module.plan.layers)
    assert all(layer.experts is not None for layer in layers)
    module.plan = module.plan.model_copy(update={"layers": layers})


SHARES = wrapped("shares")
SSD = wrapped("ssd_chunked", "ssd_step")
# The variants that stand for the families: each has every part of its family, where not another is named.
MIXERS = ("granite-rope", "mamba2-odd", "bamba-last", "falcon-h1-biases", "nemotron-h-biases")
SCANS = ("mamba-biases", "falcon-mamba")
RECURRENT = (*MIXERS, *SCANS)
CONVS = (*RECURRENT, "lfm2-first")
ALONE = ("nemotron-h", "nemotron-h-biases")  # each part a layer of its own
SCALED = ("llama", "granite-rope", "bamba-last", "falcon-h1-biases")  # in the queries
EXPERTS = ("lfm2-moe", "granite-moe")
NORMED = ("qwen3", "lfm2-first")  # queries and keys
ATTENTION = (*SCALED, *NORMED)
BIASED = (
    "granite-biases",
    "mamba2-odd",
    "bamba-last",
    "falcon-h1-biases",
    "mamba-biases",
    "lfm2-first",
    "nemotron-h-biases",
)
MUTATIONS: dict[str, tuple[Mutation, tuple[str, ...]]] = {
    "D dropped": (dropped("D"), RECURRENT),
    "dt bias dropped": (dropped("dt_bias"), RECURRENT),
    "softplus forgotten": (wrapped("softplus")(lambda _, x: torch.relu(x)), RECURRENT),
    "another time step limit": (mixer(dt_low=0.5, dt_high=0.6), MIXERS),
    "A without exp": (changed("A", lambda a: -torch.log(-a).abs()), RECURRENT),
    "decay dropped": (dropped("A"), RECURRENT),
    "B and C swapped": (SSD(swapped), MIXERS),
    "B and C swapped in the scan": (wrapped("step", "blocked", place=scan)(swapped), SCANS),
    "norms of B, C and dt forgotten": (
        wrapped("rms_norm")(lambda norm, x, w, eps: x if w is None else norm(x, w, eps)),
        ("falcon-mamba",),
    ),
    "B of the next group": (SSD(next_group), MIXERS),
    "gate taken for x": (gate_for_x, MIXERS),
    "gate and x swapped": (changed("in", lambda w: w.roll(w.shape[0] // 2, 0)), SCANS),
    "gate, x and B in another order": (changed("in", lambda w: w.roll(w.shape[0] // 3, 0)), ("lfm2-first",)),
    "pads move the state": (wrapped("valid_rows")(lambda rows, *args: torch.ones_like(rows(*args))), RECURRENT),
    "conv off by one tap": (changed("conv", lambda w: w.roll(1, 0)), CONVS),
    "conv the wrong way round": (changed("conv", lambda w: w.flip(0)), CONVS),
    "conv bias dropped": (dropped("conv_bias"), CONVS),
    "conv not activated": (wrapped("causal_conv")(unactivated), RECURRENT),
    "conv state a token late": (wrapped("tail_rows")(lambda rows, *args: rows(*args).roll(-1, -1)), CONVS),
    "in bias dropped": (dropped("in_bias"), BIASED),
    "out bias dropped": (dropped("out_bias"), BIASED),
    "mixer's norm forgotten": (unnormed("gated_norm"), (*MIXERS, "falcon-h1-norm")),
    "mixer's norm without weight": (unweighted("gated_norm"), (*MIXERS, "falcon-h1-norm")),
    "mixer's norm over all groups": (
        wrapped("group_rms_norm")(lambda norm, x, w, eps, _: norm(x, w, eps, 1)),
        (*MIXERS, "falcon-h1-norm"),
    ),
    "mixer's norm before the gate": (mixer(norm="before the gate"), MIXERS),
    "mixer's norm after the gate": (mixer(norm="after the gate"), ("falcon-h1-norm",)),
    "query scale forgotten": (changed("q", lambda w: w * 4), (*SCALED, *ALONE)),
    "query's norm without scale": (changed("q_norm", lambda w: w * 4), NORMED),
    "query's norm without weight": (changed("q_norm", lambda w: torch.full_like(w, float(w.mean()))), NORMED),
    "query's norm forgotten": (unnormed("q_norm"), NORMED),
    "key's norm forgotten": (unnormed("k_norm"), NORMED),
    "key's norm without weight": (unweighted("k_norm"), NORMED),
    "KV heads mixed": (wrapped("attention", place=attention)(mixed_heads), (*ATTENTION, *ALONE)),
    "keys a few rows off": (changed("k", lambda w: w.roll(8, 0)), (*ATTENTION, *ALONE)),
    "values a few rows off": (changed("v", lambda w: w.roll(8, 0)), (*ATTENTION, *ALONE)),
    "causal mask forgotten": (
        wrapped("causal_mask", place=attention)(lambda mask, *args: mask(*args) * 0),
        (*ATTENTION, *ALONE),
    ),
    "RoPE forgotten": (wrapped("rope", place=attention)(lambda _, x, cos, sin: x), ATTENTION),
    "RoPE the wrong way round": (
        wrapped("rope", place=attention)(lambda rope, x, cos, sin: rope(x, cos, -sin)),
        ATTENTION,
    ),
    "RoPE of neighbours": (wrapped("rope", place=attention)(neighbours), ATTENTION),
    "norm1 forgotten": (unnormed("norm1"), ATTENTION),
    "norm1 without weight": (unweighted("norm1"), ATTENTION),
    "norm2 forgotten": (unnormed("norm2"), ATTENTION),
    "norm2 without weight": (unweighted("norm2"), ATTENTION),
    "last norm forgotten": (unnormed("norm"), (*ATTENTION, "mamba2-odd", *SCANS)),
    "last norm without weight": (unweighted("norm"), (*ATTENTION, "mamba2-odd", *SCANS)),
    "gate and up swapped": (changed("gate_up", lambda w: w.roll(w.shape[0] // 2, 0)), ATTENTION),
    "relu for its square": (wrapped("relu2")(lambda _, x: torch.relu(x)), ALONE),
    "silu for relu": (wrapped("relu2")(lambda _, x: ops.silu(x) ** 2), ALONE),
    "norm of a layer of one part forgotten": (unnormed("norm"), ALONE),
    "norm of a layer of one part without weight": (unweighted("norm"), ALONE),
    "norm of an MLP alone forgotten": (unnormed_alone(Mlp), ALONE),
    "norm of attention alone forgotten": (unnormed_alone(Attention), ALONE),
    "an MLP alone forgotten": (left_out, ALONE),
    "up bias dropped": (dropped("up_bias"), ALONE[1:]),
    "down bias dropped": (dropped("down_bias"), ALONE[1:]),
}
MUTATIONS |= {
    "router forgotten": (dropped("router"), EXPERTS),
    "experts numbered otherwise": (changed("router", lambda w: w.roll(1, 0)), EXPERTS),
    "another number of experts": (SHARES(lambda shares, s, b, k, **form: shares(s, b, k - 1, **form)), EXPERTS),
    "the worst experts": (SHARES(lambda shares, s, b, k, **form: shares(-s, b, k, **form)), EXPERTS),
    "experts in equal shares": (
        SHARES(lambda shares, s, b, k, **form: (shares(s, b, k, **form) > 0).to(s.dtype) / k),
        EXPERTS,
    ),
    "router bias dropped": (dropped("router_bias"), EXPERTS[:1]),
    "router bias in the weights": (SHARES(weighed_with_bias), EXPERTS[:1]),
    "shares not normed": (
        SHARES(lambda shares, s, b, k, **form: shares(s, b, k, **{**form, "normed": False})),
        EXPERTS[:1],
    ),
    "softmax for sigmoid": (
        SHARES(lambda shares, s, b, k, **form: shares(s, b, k, **{**form, "sigmoid": False})),
        EXPERTS[:1],
    ),
    "softmax of all experts": (SHARES(softmax_of_all), EXPERTS[1:]),
    "shared part forgotten": (without_shared, EXPERTS[1:]),
    "gate and up of experts swapped": (
        wrapped("experts")(lambda run, x, shares, gate, up, down: run(x, shares, up, gate, down)),
        EXPERTS,
    ),
    "down of the next expert": (changed("experts_down", lambda w: w.roll(1, 0)), EXPERTS),
    "gate of the next expert": (changed("experts_gate", lambda w: w.roll(1, 0)), EXPERTS),
    "up of the next expert": (changed("experts_up", lambda w: w.roll(1, 0)), EXPERTS),
}
# By default each is made in one of the families that have the part.
CASES = [
    pytest.param(name, variant, marks=[pytest.mark.full] if variant != variants[n % len(variants)] else [])
    for n, (name, (_, variants)) in enumerate(MUTATIONS.items())
    for variant in variants
]
MULTIPLIERS: dict[str, tuple[str, ...]] = {  # all that a family has, and an index where they stand in a list
    "granite": ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
    "falcon-h1": (
        "embedding_multiplier",
        "lm_head_multiplier",
        "mlp_multipliers.0",
        "mlp_multipliers.1",
        "key_multiplier",
        "attention_in_multiplier",
        "attention_out_multiplier",
        "ssm_in_multiplier",
        *(f"ssm_multipliers.{i}" for i in range(5)),
        "ssm_out_multiplier",
    ),
    "falcon-h1-norm": ("embedding_multiplier", "lm_head_multiplier"),  # tied
    "lfm2-moe": ("routed_scaling_factor",),
    "granite-moe": ("residual_multiplier",),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Original:
    """By variant: the source, a prompt, and transformers' logits (1 + STEPS, V) where `error` looks at them."""

    @cache
    def made(variant: str) -> tuple[Source, list[int], NDArray[np.float32]]:
        from transformers import AutoModelForCausalLM

        folder = tiny.write_source(tmp_path_factory.mktemp("source"), variant)
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, model.config.vocab_size, (PREFILL + STEPS,), generator=generator).tolist()
        return Source.open(folder), ids, oracle.continued(model, ids)[0][PREFILL - 1 :]

    return made


def authored(source: Source, config: Any) -> FlatModule:
    family = family_of(config)
    parsed = family.parse(config)
    bound = {name: binding(source) for name, binding in family.bindings(parsed).items()}
    return author(family, parsed, bound, 64)


def error(module: FlatModule, ids: list[int], expected: NDArray[np.float32]) -> float:
    """The largest of a prefill and the steps after it, of the largest logit."""
    host = Host(module)
    rows = [host.feed(ids[:PREFILL], BUCKET), *(host.feed([i], 1) for i in ids[PREFILL:])]
    return float(np.abs(np.stack(rows) - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("variant", sorted({v for _, vs in MUTATIONS.values() for v in vs} | {*MULTIPLIERS}))
def test_nothing_is_broken_before(original: Original, variant: str) -> None:
    source, ids, expected = original(variant)
    assert error(authored(source, source.config), ids, expected) <= TOLERANCE


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_a_broken_part_is_seen(original: Original, name: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, ids, expected = original(variant)
    module = authored(source, source.config)
    MUTATIONS[name][0](module, monkeypatch)
    assert error(module, ids, expected) > SEEN


@pytest.mark.parametrize(("variant", "field"), [(v, field) for v, fields in MULTIPLIERS.items() for field in fields])
def test_a_forgotten_multiplier_is_seen(original: Original, variant: str, field: str) -> None:
    source, ids, expected = original(variant)
    config: Any = copy.deepcopy(source.config)
    name, _, index = field.partition(".")
    place, key = (config[name], int(index)) if index else (config, name)
    assert place[key] != 1.0
    place[key] = 1.0
    assert error(authored(source, config), ids, expected) > SEEN
