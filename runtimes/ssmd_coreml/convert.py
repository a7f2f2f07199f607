"""The conversion of a re-authored module to a Core ML program of one function: one length, caches of one capacity.

Stateful: the states are MLState's, stacked by kind (stacks.py), float16, and a step writes them where they are.
Stateless: they are inputs and outputs, float32, with the names of flat IO; a program writes the new rows.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ssmd.authoring.flat import FlatModule, Positional
from ssmd.authoring.host import graph_shapes
from ssmd_coreml import library
from ssmd_coreml.graph import OUTPUT
from ssmd_coreml.stacks import Stack, Variant, stacks

# Operations that return part of their first input unchanged.
_VIEWS = frozenset(("cast", "expand_dims", "reshape", "slice_by_index", "squeeze", "transpose"))
_CACHES = frozenset(("key", "value"))
_PARAMETER = "module."  # before the name of one in a trace: the wrappers below hold the module by that name


def converted(module: FlatModule, length: int, variant: Variant, *, half: bool) -> Any:
    """Return a coremltools MLModel with the function "main" for `length` tokens and caches of the module's context.

    half: float16 for weights and for values read from states or written to them. All else is float32, as squares,
    exponents and sums of a model's activations leave float16 (docs/notes/log.md). Without it all is float32, which a
    stateful program does not support.
    """
    ct = library.coremltools()
    module.rotation = _Rotation(module)  # type: ignore[method-assign, assignment] # of this one module; no windows here
    tokens = (torch.zeros(1, length, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    example = (*tokens, torch.ones(1, dtype=torch.int32))
    inputs = [
        ct.TensorType(name=name, shape=tuple(value.shape), dtype=np.int32)
        for name, value in zip(("tokens", "pos", "n_valid"), example, strict=True)
    ]
    outputs = [ct.TensorType(name="logits", dtype=np.float32)]
    states = None
    wrapper: nn.Module
    if variant == "stateful":
        wrapper = _Stateful(module)
        states = [
            ct.StateType(wrapped_type=ct.TensorType(shape=s.shape, dtype=np.float16), name=s.name)
            for s in wrapper.stacks
        ]
    else:
        shapes = graph_shapes(module.spec, module.context)
        wrapper = Positional(module, tuple(shapes))
        example = (*example, *(torch.zeros(shape) for shape in shapes.values()))
        inputs += [ct.TensorType(name=name, shape=shape, dtype=np.float32) for name, shape in shapes.items()]
        outputs += [ct.TensorType(name=OUTPUT + name, dtype=np.float32) for name in shapes]
    precision = ct.transform.FP16ComputePrecision(op_selector=_half) if half else ct.precision.FLOAT32
    pipeline = ct.PassPipeline.DEFAULT
    pipeline.append_pass(_whole_updates())
    with library.quiet(), torch.no_grad():
        traced = torch.jit.trace(wrapper.eval(), example, check_trace=False)
        return ct.convert(
            traced,
            inputs=inputs,
            outputs=outputs,
            states=states,
            minimum_deployment_target=ct.target.iOS18,
            compute_precision=precision,
            pass_pipeline=pipeline,
            skip_model_load=True,
        )


class _Rotation:
    """FlatModule.rotation with a minimum of whole numbers: Core ML clamps none but floats."""

    def __init__(self, module: FlatModule) -> None:
        self._last = module.context - 1
        self._tables = [getattr(module, name, None) for name in ("cos", "sin")]

    def __call__(self, pos: Tensor, length: int) -> tuple[Tensor, Tensor]:
        rows = torch.minimum(pos + torch.arange(length, dtype=torch.int32), torch.tensor([self._last]).int())
        cos, sin = (torch.index_select(t, 0, rows).reshape(length, 1, -1) for t in self._tables if t is not None)
        return cos, sin


class _Stateful(nn.Module):
    """A program whose buffers are states: each is read once, handed out by layers, and written once."""

    def __init__(self, module: FlatModule) -> None:
        super().__init__()
        self.module = module
        self.stacks = stacks(module.spec, module.context)
        for stack in self.stacks:
            self.register_buffer(stack.name, torch.zeros(stack.shape))

    def forward(self, tokens: Tensor, pos: Tensor, n_valid: Tensor) -> Tensor:
        states = {}
        for stack in self.stacks:
            whole = getattr(self, stack.name)
            for i, t in enumerate(stack.layers):
                states[t.name] = whole[i : i + 1] if stack.recurrent else whole[i]
        out = self.module(tokens, pos, n_valid, **states)
        at = None if all(s.recurrent for s in self.stacks) else self._rows(tokens.shape[1], pos, n_valid)
        for stack in self.stacks:
            getattr(self, stack.name)[:] = self._updated(stack, [out[t.name] for t in stack.layers], at)
        logits: Tensor = out["logits"]
        return logits

    def _rows(self, length: int, pos: Tensor, n_valid: Tensor) -> Tensor:
        """Return (S, T): 1 where a slot of the caches takes a token. Unlike an index it cannot be out of range."""
        slots = torch.arange(self.module.context, dtype=torch.int32).reshape(-1, 1)
        row = torch.arange(length, dtype=torch.int32).reshape(1, -1)
        return (slots == row + pos).to(torch.float32) * (row < n_valid).to(torch.float32)

    def _updated(self, stack: Stack, new: list[Tensor], at: Tensor | None) -> Tensor:
        """Return a stack with new values. new: by layer, (1, …) for whole tensors, (G, T, D) or (G, D, T) for rows."""
        if stack.recurrent:
            return torch.cat(new, 0)
        assert at is not None
        whole, rows = getattr(self, stack.name), torch.stack(new)
        kept = 1.0 - at.sum(1, keepdim=True)  # (S, 1)
        if stack.kind == "key":
            return whole * kept + torch.matmul(at, rows)  # (L, G, S, D)
        return whole * kept.reshape(1, -1) + torch.matmul(rows, at.T)  # (L, G, D, S)


def _half(op: Any) -> bool:
    """Return True if an operation becomes float16.

    These are products with weights, attention over the caches, and operations between a state and the first or last
    operation that computes with it.
    """
    if op.op_type == "linear":
        return is_weight(op.weight)
    if op.op_type == "gather":
        return is_weight(op.x)
    inputs = [v for v in op.inputs.values() if v is not None and not isinstance(v, list | tuple)]
    if sources := {source for v in inputs if (source := _state_of(v))}:
        return op.op_type in _VIEWS or (op.op_type in ("matmul", "mul") and sources <= _CACHES)
    if op.op_type == "add":
        return any(v.op is not None and v.op.op_type == "mul" and _half(v.op) for v in inputs)
    return any(_to_state(child) for output in op.outputs for child in output.child_ops)


def is_weight(value: Any) -> bool:
    """Return True if a constant is a parameter of two dimensions, by name and shape; tables and masks are not."""
    name = value.name.removeprefix(_PARAMETER)
    return name != value.name and name not in ("cos", "sin") and len(value.shape) == 2


def _state_of(value: Any) -> str:
    """Return the kind of state that a value is, or is part of; "" if it is not a state."""
    op = value.op
    while op is not None and op.op_type in _VIEWS:
        op = op.x.op
    return str(op.input.name).partition("_")[0] if op is not None and op.op_type == "read_state" else ""


def _to_state(op: Any) -> bool:
    """Return True if an operation writes a state, or adds new rows to one."""
    if op.op_type in ("slice_update", "coreml_update_state"):
        return True
    return op.op_type == "add" and any(_to_state(child) for output in op.outputs for child in output.child_ops)


@cache
def _whole_updates() -> str:
    """Register a pass that lets a state be written without a copy, and return its name.

    coremltools turns an assignment to a whole buffer into an update of a slice that covers it.
    """
    library.coremltools()
    from coremltools.converters.mil.mil.passes.graph_pass import AbstractGraphPass
    from coremltools.converters.mil.mil.passes.pass_registry import register_pass

    class WholeUpdates(AbstractGraphPass):
        def apply(self, prog: Any) -> None:
            for function in prog.functions.values():
                for op in function.find_ops(op_type="slice_update"):
                    if op.update.shape == op.x.shape and op.update.dtype == op.x.dtype:
                        function.replace_uses_of_var_after_op(op, op.outputs[0], op.update)
                        function.remove_ops([op])

    register_pass(namespace="ssmd", name="whole_updates")(WholeUpdates)
    return "ssmd::whole_updates"
