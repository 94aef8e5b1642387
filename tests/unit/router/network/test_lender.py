"""What a worker lends, and which gateways it dares to call."""

from __future__ import annotations

import pytest

from headrace._common.errors import StartupError
from headrace_router.network.joining import check_gateway, told_name
from headrace_router.network.lender import Lender


def test_a_lender_gives_nothing_while_it_has_a_reason() -> None:
    load, available = [1.0], [True]
    lender = Lender(4, 2.5, lambda: load[0], lambda: available[0])
    assert (lender.capacity, lender.reason) == (4, None)
    load[0] = 2.6
    assert (lender.capacity, lender.reason) == (0, "the machine's load is 2.6, above 2.5")
    available[0] = False
    assert lender.reason == "the upstream does not answer"
    lender.paused = True
    assert lender.reason == "paused"
    load[0], available[0], lender.paused = 2.5, True, False
    assert lender.capacity == 4
    assert Lender(4, None, lambda: 1000.0).capacity == 4


@pytest.mark.parametrize("url", ["ws://127.0.0.1:3000", "ws://localhost", "ws://[::1]:1", "wss://gateway.example.org"])
def test_gateways_that_are_safe_to_call(url: str) -> None:
    check_gateway(url, insecure=False)


@pytest.mark.parametrize(("url", "why"), [
    ("ws://gateway.example.org", "--insecure"), ("ws://10.0.0.1:3000", "--insecure"), ("http://127.0.0.1", "wss://"),
    ("wss://", "wss://"), ("gateway", "wss://"),
])
def test_gateways_that_are_not(url: str, why: str) -> None:
    with pytest.raises(StartupError, match=why):
        check_gateway(url, insecure=False)


def test_a_gateway_is_not_told_where_files_are() -> None:
    assert [told_name(name) for name in ("/home/anna/models/one", "./one", "~/one", "org/one", "one")] == [
        "one", "one", "one", "org/one", "one",
    ]


def test_who_says_so_may_show_the_token() -> None:
    check_gateway("ws://10.0.0.1:3000", insecure=True)
