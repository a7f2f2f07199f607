"""Names of processors, from what systems say of them: none of these but x86 under Linux was at hand."""

from __future__ import annotations

import pytest

from ssmd.machine.processor import cpu_name, name_in, sysctl

X86 = (
    "processor\t: 0\nmodel name\t: Intel(R) Xeon(R) Processor @ 2.10GHz\nflags\t\t: fpu sse2 avx2 avx512f avx512_vnni\n"
)


def arm(features: str, *cores: tuple[int, int]) -> str:
    """/proc/cpuinfo of an ARM processor with these cores, (implementer, part)."""
    return "".join(
        f"processor\t: {n}\nBogoMIPS\t: 108.00\nFeatures\t: {features}\nCPU implementer\t: {maker:#04x}\n"
        f"CPU architecture: 8\nCPU variant\t: 0x4\nCPU part\t: {part:#05x}\nCPU revision\t: 1\n\n"
        for n, (maker, part) in enumerate(cores)
    )


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        (X86, "Intel(R) Xeon(R) Processor @ 2.10GHz avx2+avx512f+avx512_vnni"),
        (arm("fp asimd crc32", *[(0x41, 0xD08)] * 4), "aarch64 ARM Cortex-A72"),  # Raspberry Pi 4
        (arm("fp asimd asimddp", *[(0x41, 0xD0B)] * 4), "aarch64 ARM Cortex-A76 asimddp"),  # Raspberry Pi 5
        (
            arm("fp asimd asimddp", *[(0x41, 0xD05)] * 4, *[(0x41, 0xD0B)] * 4),  # RK3588
            "aarch64 ARM Cortex-A55 and ARM Cortex-A76 asimddp",
        ),
        (arm("asimddp i8mm sve", (0x41, 0xD40)), "aarch64 ARM Neoverse-V1 asimddp+i8mm+sve"),  # Graviton 3
        (arm("asimddp i8mm", (0x51, 0x001)), "aarch64 Qualcomm 0x001 asimddp+i8mm"),
        (arm("asimddp", (0x61, 0x022), (0x61, 0x023)), "aarch64 Apple 0x022 and Apple 0x023 asimddp"),  # M1, Asahi
        (arm("", (0x99, 0x7)), "aarch64 0x99 0x007"),
        ("", "aarch64"),
    ],
)
def test_a_name_tells_processors_apart(cpuinfo: str, name: str) -> None:
    assert name_in(cpuinfo, "aarch64") == name


def test_a_mac_is_named_by_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As platform.processor() is "arm" on all of them."""
    monkeypatch.setattr("sys.platform", "darwin")
    for chip in ("Apple M1", "Apple M4 Pro"):
        monkeypatch.setattr("ssmd.machine.processor.sysctl", {"machdep.cpu.brand_string": chip}.get)
        assert cpu_name() == chip


def test_what_no_kernel_tells_is_nothing() -> None:
    assert sysctl("ssmd.no.such.name") == ""
