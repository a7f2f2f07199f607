"""A conversation that begins under one runtime goes on under another, killed in between, and comes back."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import evaluated
import numpy as np
import pytest
from conftest import TinyArtifacts
from daemon_process import Reply
from forked import DaemonProcess
from whole.test_resume import QUESTIONS, SAMPLING, SYSTEM, fed, say

from ssmd_wgpu.device import adapters

# Largest difference of a chosen token's log-probability between the conversation that moved and one that did not.
# float32: sums in another order, measured 2e-6. int8: the runtimes round activations in other blocks, measured 0.02.
TOLERANCES = {"f32": 1e-4, "int8": 0.2}


def turn(daemon: DaemonProcess, messages: list[dict[str, str]], forced: Reply | None = None) -> Reply:
    """Ask the next question. `forced` is the answer that the client goes on with, whatever was said."""
    messages.append(say(QUESTIONS[len(messages) // 2 % len(QUESTIONS)]))
    reply = daemon.chat(messages, max_tokens=24, logprobs=True, top_logprobs=5, **SAMPLING)
    messages.append(say((forced or reply).text, "assistant"))
    return reply


ROUTES = (
    ("litert", "wgpu", "openvino", "litert"),
    ("litert", "litert", "openvino", "openvino", "litert"),
    ("litert", "wgpu", "wgpu", "openvino", "wgpu", "litert"),
    ("litert", "coreml", "coreml", "openvino", "coreml", "litert"),
)
# Of the others contract/test_moving.py says as much: a state of each runtime goes on under each other one.
USUAL = ((ROUTES[0], "f32"),)


@pytest.mark.parametrize(
    ("route", "quantization"),
    [
        pytest.param(r, q, marks=[] if (r, q) in USUAL else [pytest.mark.full], id=f"{' '.join(r)} {q}")
        for r in ROUTES
        for q in ("f32", "int8")
    ],
)
def test_there_and_back(quantization: str, route: tuple[str, ...], artifacts: TinyArtifacts, tmp_path: Path) -> None:
    if "wgpu" in route and not adapters():
        pytest.skip("no adapter here: apt install mesa-vulkan-drivers libvulkan1")
    name = f"granite-{quantization}"
    paths = [artifacts[name if runtime == "litert" else f"{runtime}-{name}"] for runtime in route]
    messages, replies = [SYSTEM], []
    for path in paths:
        with DaemonProcess(path, tmp_path / "moved", program=evaluated.SSMD) as daemon:
            replies.append(turn(daemon, messages))
            daemon.kill()
    kinds = [r.usage["ssmd"]["resume"] for r in replies]
    assert kinds == ["none", *("exact" if a == b else "portable" for a, b in pairwise(route))]
    assert len({r.session for r in replies}) == 1
    for reply in replies[1:]:  # earlier turns are not read again, whichever runtime computed them
        assert fed(reply) < 100
        assert reply.usage["prompt_tokens_details"]["cached_tokens"] > 50
    stayed, others = [SYSTEM], []
    with DaemonProcess(paths[0], tmp_path / "stayed") as daemon:
        others = [turn(daemon, stayed, forced=reply) for reply in replies]
    same_yet = 1 + (route[0] == route[1])
    assert [r.logprobs for r in replies[:same_yet]] == [r.logprobs for r in others[:same_yet]]
    # A sampled token may tip over where logits differ by rounding: up to the first that did, the rest says nothing.
    for moved, other in zip(replies[same_yet:], others[same_yet:], strict=True):
        pairs = np.array(list(zip(moved.logprobs, other.logprobs, strict=False)))
        assert len(pairs) == 24 or moved.text != other.text
        if quantization == "f32":
            assert moved.text == other.text
        same = len(pairs) if moved.text == other.text else 1
        assert np.abs(pairs[:same, 0] - pairs[:same, 1]).max() <= TOLERANCES[quantization]
