"""Devices for tests of kernels, and random numbers of each test's own."""

from __future__ import annotations

import pytest
from shaders import opened, reseed

from ssmd_wgpu.device import Gpu


@pytest.fixture(scope="module", params=["vulkan", pytest.param("gl", marks=pytest.mark.full)])
def gpu(request: pytest.FixtureRequest) -> Gpu:
    """OpenGL has a smaller set by default: its kernels are those of Vulkan, translated by another backend of wgpu."""
    return opened(request.param)


@pytest.fixture(scope="module", params=["vulkan", "gl"])
def any_gpu(request: pytest.FixtureRequest) -> Gpu:
    return opened(request.param)


@pytest.fixture(autouse=True)
def _own_numbers(request: pytest.FixtureRequest) -> None:
    reseed(request.node.name)
