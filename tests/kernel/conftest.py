"""The kernel under test: both of them, one after the other."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest


@pytest.fixture(params=["plain", "_compiled"], scope="session")
def kernel(request: pytest.FixtureRequest) -> ModuleType:
    try:
        return importlib.import_module(f"upper.kernel.{request.param}")
    except ImportError as missing:
        pytest.skip(f"the compiled kernel was not built here ({missing}); `make kernel` shows why")
