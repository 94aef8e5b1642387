"""Request headers: who, which class, how long, which id, from where."""

from __future__ import annotations

import time

import pytest
from multidict import CIMultiDict

from headrace._common.errors import Forbidden, InvalidRequest, StartupError, Unauthorized
from headrace_router.api.caller import identify
from headrace_router.api.cors import Cors
from headrace_router.api.request_ids import origin
from headrace_router.tenants import DEFAULT, Tenant, Tenants, digest

KEYED = Tenants("SeCrEt")


@pytest.mark.parametrize("headers", [
    {"Authorization": "Bearer SeCrEt"}, {"authorization": "bearer SeCrEt"}, {"Authorization": "BEARER SeCrEt"},
    {"x-api-key": "SeCrEt"}, {"X-Api-Key": "SeCrEt", "Authorization": "Basic dTpw"},
    {"X-Api-Key": "other", "Authorization": "Bearer SeCrEt"},
])
def test_keys_are_shown_in_two_ways(headers: dict[str, str]) -> None:
    assert identify(CIMultiDict(headers), KEYED).tenant is DEFAULT


@pytest.mark.parametrize("header", ["", "SeCrEt", "Bearer", "Bearer ", "Bearer  SeCrEt", "Basic SeCrEt", "Bearer SeCrEt "])
def test_other_headers_are_no_keys(header: str) -> None:
    with pytest.raises(Unauthorized):
        identify(CIMultiDict({"Authorization": header}), KEYED)


def test_classes_are_bounded_by_the_tenant() -> None:
    class Source:
        def read(self) -> dict[bytes, Tenant]:
            return {digest("k"): Tenant("t", classes=("document", "agent"))}

        def changed(self) -> bool:
            return False

    tenants, key = Tenants(None, Source()), {"x-api-key": "k"}
    assert identify(CIMultiDict(key), tenants).workload == "document"
    assert identify(CIMultiDict({**key, "X-Headrace-Class": "agent"}), tenants).workload == "agent"
    assert identify(CIMultiDict(key), tenants).min_tier == "trusted"
    assert identify(CIMultiDict({**key, "X-Headrace-Min-Tier": "open"}), tenants).min_tier == "open"
    with pytest.raises(InvalidRequest, match="owner"):
        identify(CIMultiDict({**key, "X-Headrace-Min-Tier": "any"}), tenants)
    with pytest.raises(Forbidden, match=r"chat.*document, agent"):
        identify(CIMultiDict({**key, "X-Headrace-Class": "chat"}), tenants)
    with pytest.raises(InvalidRequest, match="chat, agent, document"):
        identify(CIMultiDict({**key, "X-Headrace-Class": "urgent"}), tenants)


def test_timeouts_are_milliseconds() -> None:
    assert identify(CIMultiDict(), Tenants()).deadline is None
    deadline = identify(CIMultiDict({"X-Request-Timeout-Ms": "60000"}), Tenants()).deadline
    assert deadline is not None
    assert 50 < deadline - time.perf_counter() <= 60


@pytest.mark.parametrize("given", ["", "0", "-1", "1.5", "1e3", "ten", "86400001", "9" * 5000, "\u0661", " 5", "+5"])
def test_other_timeouts_are_refused(given: str) -> None:
    with pytest.raises(InvalidRequest, match="X-Request-Timeout-Ms") as caught:
        identify(CIMultiDict({"X-Request-Timeout-Ms": given}), Tenants())
    assert caught.value.field == "X-Request-Timeout-Ms"


@pytest.mark.parametrize("given", ["a", "req_1-2.3:4/5+6=@7", "f" * 128])
def test_usable_ids_are_kept(given: str) -> None:
    assert origin(CIMultiDict({"X-Request-Id": given})).request_id == given


@pytest.mark.parametrize("given", ["", "a b", "a\nINFO forged", "x" * 129, "\u00e9", "a\x1b[31m", "a\udcff"])
def test_other_ids_are_replaced(given: str) -> None:
    made = origin(CIMultiDict({"X-Request-Id": given})).request_id
    assert made.isalnum()
    assert made != origin(CIMultiDict({"X-Request-Id": given})).request_id


@pytest.mark.parametrize(("given", "trace"), [
    ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "4bf92f3577b34da6a3ce929d0e0e4736"),
    ("cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-later", "4bf92f3577b34da6a3ce929d0e0e4736"),
    (f"00-{'0' * 32}-00f067aa0ba902b7-01", None), (f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01", None),
    ("00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01", None), ("", None), ("x\ny", None),
])
def test_traces(given: str, trace: str | None) -> None:
    assert origin(CIMultiDict({"traceparent": given})).trace_id == trace


def test_all_origins_may_read_by_default() -> None:
    asked = CIMultiDict({"Origin": "https://a.example"})
    for cors in (Cors(()), Cors(("https://b.example", "*"))):
        assert cors.headers(asked)["Access-Control-Allow-Origin"] == "*"
        assert cors.headers(CIMultiDict()) == {}


def test_only_named_origins_may_read() -> None:
    cors = Cors(("https://a.example", "http://localhost:8000"))
    assert cors.headers(CIMultiDict({"Origin": "https://a.example"})) == {
        "Access-Control-Allow-Origin": "https://a.example", "Access-Control-Expose-Headers": "*", "Vary": "Origin",
    }
    for other in ("https://b.example", "https://a.example.evil", "http://a.example", "null"):
        assert cors.headers(CIMultiDict({"Origin": other})) == {"Vary": "Origin"}


def test_preflights() -> None:
    cors = Cors(())
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    names = "authorization, content-type, x-stainless-os"
    answer = cors.preflight(CIMultiDict({**asked, "Access-Control-Request-Headers": names}))
    assert answer is not None
    assert answer["Access-Control-Allow-Headers"] == names
    assert "POST" in answer["Access-Control-Allow-Methods"]
    assert "Access-Control-Allow-Credentials" not in answer
    odd = cors.preflight(CIMultiDict({**asked, "Access-Control-Request-Headers": "a\r\nSet-Cookie: b"}))
    assert odd is not None
    assert "Access-Control-Allow-Headers" not in odd
    assert cors.preflight(CIMultiDict({"Origin": "https://a.example"})) is None


@pytest.mark.parametrize("given", [
    "example.org", "https://a.example/", "https://", "https://*.example", "https://a,https://b", "",
])
def test_what_is_no_origin_is_refused(given: str) -> None:
    with pytest.raises(StartupError, match="--cors-allow-origin"):
        Cors((given,))
