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

from ssmd.authoring import attention, delta, ops, scan
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
                patch.setattr(place, name, lambda *args, original=original: function(original, *args))

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


def rule(change: Callable[..., Any]) -> Mutation:
    """Both forms of the gated delta rule, with q, k, v, g, beta and the state changed."""
    both = wrapped("chunked", "step", place=delta)
    return both(lambda form, *args: form(*change(*args[:6]), *args[6:]))


def next_key_head(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> Any:
    """Value heads read the keys and queries of the key head after their own."""
    width = state.shape[-1]
    assert k.shape[-1] > width, "there is one key head only"
    return q.roll(-width, -1), k.roll(-width, -1), v, g, beta, state


def gate_for_query(module: FlatModule, _: pytest.MonkeyPatch) -> None:
    for query, gate in zip(parameters(module, "q"), parameters(module, "gate"), strict=True):
        gate.copy_(query)


def gate_before_norm(module: FlatModule, patch: pytest.MonkeyPatch) -> None:
    """The gated norm is of y * silu(gate)."""
    weights = {id(p) for p in parameters(module, "gated_norm")}
    silu, gates = ops.silu, list[Any]()
    linear = type(module).linear

    def noted(self: Any, layer: int, name: str, x: Any) -> Any:
        y = linear(self, layer, name, x)
        if name == "in":
            gates.append(silu(y[..., : self.plan.layers[layer].mixers[0].inner]))
        return y

    def normed(norm: Any, x: Any, w: Any, eps: float) -> Any:
        if id(w) not in weights:
            return norm(x, w, eps)
        gate = gates[-1].reshape(x.shape)
        return norm(x * gate, w, eps) / gate  # the mixer multiplies by it

    patch.setattr(type(module), "linear", noted)
    wrapped("rms_norm")(normed)(module, patch)


SSD = wrapped("ssd_chunked", "ssd_step")
DELTA = ("qwen3.5", "qwen3.5-odd")
# The variants that stand for the families: each has every part of its family, where not another is named.
MIXERS = ("granite-rope", "mamba2-odd", "bamba-last", "falcon-h1-biases", "nemotron-h-biases")
SCANS = ("mamba-biases", "falcon-mamba")
RECURRENT = (*MIXERS, *SCANS)
CONVS = (*RECURRENT, "lfm2-first")
ALONE = ("nemotron-h", "nemotron-h-biases")  # each part a layer of its own
SCALED = ("llama", "granite-rope", "bamba-last", "falcon-h1-biases")  # in the queries
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
    "output gate forgotten": (changed("gate", lambda w: w * 0 + 0.0), DELTA),
    "output gate taken for the query": (gate_for_query, DELTA),
    "norms by w instead of 1 + w": (changed("norm1", lambda w: w - 1), DELTA),
    "key's norm by w instead of 1 + w": (changed("k_norm", lambda w: w - 1), DELTA),
    "gated norm by 1 + w": (changed("gated_norm", lambda w: w + 1), DELTA),
    "gated norm forgotten": (unnormed("gated_norm"), DELTA),
    "gated norm after the gate": (gate_before_norm, DELTA),
    "decay of gated DeltaNet dropped": (dropped("A"), DELTA),
    "dt bias of gated DeltaNet dropped": (dropped("dt_bias"), DELTA),
    "beta and a swapped": (changed("ba", lambda w: w.roll(len(w) // 2, 0)), DELTA),
    "beta of 1": (rule(lambda q, k, v, g, beta, s: (q, k, v, g, torch.sign(beta), s)), DELTA),
    "beta to 2": (rule(lambda q, k, v, g, beta, s: (q, k, v, g, 2 * beta, s)), DELTA),
    "keys and queries swapped": (rule(lambda q, k, v, g, beta, s: (k, q, v, g, beta, s)), DELTA),
    "keys of the next key head": (rule(next_key_head), DELTA),
    "query scale of gated DeltaNet forgotten": (
        wrapped("l2", place=delta)(lambda l2, x: 2 * l2(x)),
        DELTA,
    ),
    "l2 forgotten": (wrapped("l2", place=delta)(lambda _, x: x), DELTA),
    "gate of gated DeltaNet taken for q": (changed("in", lambda w: w.roll(len(w) // 4, 0)), DELTA),
    "pads move gated DeltaNet's state": (
        wrapped("valid_rows")(lambda rows, *args: torch.ones_like(rows(*args))),
        DELTA,
    ),
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
