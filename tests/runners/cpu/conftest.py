"""The kernels for every instruction set this machine can run: its own, those that older ones have, none."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slipstream.runners.cpu.bindings import Kernels
from slipstream.runners.cpu.build import ISA_FLAGS, ISA_VARIABLE, build, find_compiler

FORMS = sorted(ISA_FLAGS) if platform.machine() == "x86_64" else ["native", "portable"]
if ISA_VARIABLE in os.environ:
    FORMS = ["native"]  # which is the one that it names
QUICK = ("native", "avx2", "portable")  # to compile each takes a while


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def kernel_dir(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Beside what pytest keeps between runs; files are named by what they were compiled from."""
    if pytestconfig.cache is None:  # -p no:cacheprovider
        return tmp_path_factory.mktemp("kernels")
    return pytestconfig.cache.mkdir("kernels")


@pytest.fixture(
    scope="session",
    params=[form if form in QUICK else pytest.param(form, marks=pytest.mark.exhaustive) for form in FORMS],
)
def any_kernels(request: pytest.FixtureRequest, kernel_dir: Path) -> Iterator[Kernels]:
    yield from _kernels(request.param, kernel_dir)


@pytest.fixture(scope="session")
def kernels(kernel_dir: Path) -> Iterator[Kernels]:
    yield from _kernels("native", kernel_dir)


def _kernels(form: str, directory: Path) -> Iterator[Kernels]:
    if find_compiler() is None:
        pytest.skip("the CPU kernels need a C compiler: Debian's package gcc")
    # The native form comes from the user's cache, as in service; the others are of no use to anyone but tests.
    built = build(ISA_FLAGS[form], None if form == "native" else directory)
    assert built.library is not None, built.why_not
    kernels = Kernels(built.library, 2)
    yield kernels
    kernels.set_threads(1)
