"""Small parts of a gateway: speeds, names, what features promise, the page of workers."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import msgspec
import pytest

from headrace._common.logs import ORIGIN, Origin, about
from headrace_router.api import workers_page
from headrace_router.api.workers import WorkerOut, WorkersOut
from headrace_router.network import features
from headrace_router.network.frames import TEXT, Model
from headrace_router.network.names import MOST, Names, call_name
from headrace_router.network.speed import Speed, Use


def test_a_speed_forgets_what_is_long_ago() -> None:
    speed = Speed()
    assert speed.value == 0
    for _ in range(100):
        speed.worked(10, 0.1)
    assert speed.value == pytest.approx(100)
    speed.worked(50, 0.0)  # at the same moment
    assert speed.value > 100
    for _ in range(500):
        speed.worked(20, 0.1)
    assert speed.value == pytest.approx(200, rel=0.02)


def test_use_follows_what_requests_produce() -> None:
    use = Use()
    for _ in range(100):
        use.ended(25, 100)
    assert use.share == pytest.approx(0.25, rel=0.01)


def test_choices_of_a_call_are_numbered_and_those_of_the_next_call_begin_anew() -> None:
    with about(Origin("first")):
        assert [call_name() for _ in range(3)] == ["first", "first.1", "first.2"]
    with about(Origin("first")):  # the same id on the same connection
        assert [call_name() for _ in range(2)] == ["first", "first.1"]
    assert ORIGIN.get() is None
    assert call_name() is None


def test_the_last_job_of_a_name_is_the_one_that_is_found() -> None:
    names = Names()
    names.add("anna", "x", "1")
    names.add("otto", "x", "2")
    names.add("anna", "x", "3")
    assert (names.find("anna", "x"), names.find("otto", "x"), names.find("eve", "x")) == ("3", "2", None)
    for number in range(MOST - 1):
        names.add("crowd", str(number), "0")
    assert names.find("anna", "x") == "3"
    assert names.find("otto", "x") is None


def test_features_promise_what_requests_need() -> None:
    assert "top_k" in features.offered(Model("m"))
    assert "top_n_tokens" not in features.offered(Model("m"))
    assert {"top_n_tokens", "grammar.regex"} <= features.offered(Model("m", features=["top_n", "grammar", "unheard of"]))
    assert "unheard of" not in features.offered(Model("m", features=["unheard of"]))
    assert features.offered(Model("m", features=[TEXT, "top_k"])) == {TEXT, "top_k"}
    assert features.resumes(["resume"])
    assert not features.resumes([])
    assert not features.resumes(["resume", TEXT])


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.inside = ""
        self.texts: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = tag
        given = dict(attrs)
        self.ids += [str(given["id"])] if "id" in given else []
        self.links += [str(given[name]) for name in ("src", "href") if name in given]

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.inside, data)


def test_the_page_of_workers_is_whole_by_itself_and_shows_what_the_json_has() -> None:
    page = _Page()
    page.feed(workers_page.PAGE)
    script = page.texts["script"]
    for kind in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(page.texts[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in workers_page.POLICY
    assert set(page.links) == {"v1/workers", "data:,"}
    assert "innerHTML" not in script  # words of workers are text
    assert "http" not in workers_page.PAGE.replace("<!doctype html>", "").replace('<html lang="en">', "").replace("</html>", "")
    used = set(re.findall(r'at\("(\w+)"\)|\["(\w+)", ', script))
    assert {name for pair in used for name in pair if name} <= set(page.ids)
    assert {"chat", "agent", "document"} <= set(page.ids)
    shown = set(re.findall(r"\bw\.(\w+)", script))
    assert shown <= {field.name for field in msgspec.structs.fields(WorkerOut)}
    assert shown >= {"session", "model", "weight_format", "tier", "state", "slots", "running", "tokens_per_second"}
    assert set(re.findall(r"\bnet\.(\w+)", script)) <= {field.name for field in msgspec.structs.fields(WorkersOut)}
