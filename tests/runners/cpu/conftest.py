"""The kernels in every form this machine can run: native, without AVX-512, portable."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slipstream.runners.torch.cpu.build import build, find_compiler
from slipstream.runners.torch.cpu.ops import Kernels

FORMS = {"native": None, "portable": ["-DSS_PORTABLE"]}
if platform.machine() == "x86_64":
    FORMS["avx2"] = ["-march=native", "-mno-avx512f", "-mno-avxvnni"]
    FORMS["narrow"] = ["-march=native", "-mno-avx512f"]  # byte products on 256 bits, where the machine has them
    FORMS["float512"] = ["-march=native", "-mno-avx512vnni"]


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def kernel_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="session", params=sorted(FORMS))
def any_kernels(request: pytest.FixtureRequest, kernel_dir: Path) -> Iterator[Kernels]:
    yield from _kernels(request.param, kernel_dir)


@pytest.fixture(scope="session")
def kernels(kernel_dir: Path) -> Iterator[Kernels]:
    yield from _kernels("native", kernel_dir)


def _kernels(form: str, directory: Path) -> Iterator[Kernels]:
    if find_compiler() is None:
        pytest.skip("no C compiler")
    # The native form comes from the user's cache, as in service; the others are of no use to anyone later.
    built = build(FORMS[form], None if form == "native" else directory)
    assert built.library is not None, built.why_not
    kernels = Kernels(built.library, 2)
    yield kernels
    kernels.set_threads(1)
