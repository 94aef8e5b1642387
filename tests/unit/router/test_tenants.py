"""API keys."""

from __future__ import annotations

import pytest

from headrace._common.errors import Unauthorized
from headrace_router.tenants import ANONYMOUS, Tenants


@pytest.mark.parametrize("header", ["Bearer SeCrEt", "bearer SeCrEt", "BEARER SeCrEt"])
def test_the_scheme_is_in_any_case(header: str) -> None:
    assert Tenants("SeCrEt").find(header) is ANONYMOUS


@pytest.mark.parametrize("header", [
    None, "", "SeCrEt", "Bearer", "Bearer ", "Bearer secret", "Bearer SeCrE", "Bearer SeCrEtX", "Bearer  SeCrEt",
    "Basic SeCrEt", "Bearer SeCrEt ", "Bearer \udcff",
])
def test_the_key_is_exact(header: str | None) -> None:
    with pytest.raises(Unauthorized):
        Tenants("SeCrEt").find(header)


def test_without_a_key_everybody_may() -> None:
    assert Tenants(None).find(None) is ANONYMOUS
    assert Tenants("").find("Bearer x") is ANONYMOUS
