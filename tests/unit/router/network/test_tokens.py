"""Worker tokens: only hashes are kept, and what is revoked is so for every process."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from headrace._common.errors import NotFound, RateLimited, StartupError
from headrace_router.network import registrar as registrar_module
from headrace_router.network.registrar import Registrar
from headrace_router.network.tokens import WorkerTokens, read_token


def test_the_first_token_is_written_once(tmp_path: Path) -> None:
    file = tmp_path / "token"
    tokens = WorkerTokens(str(file))
    tokens.ensure_first()
    first = read_token(str(file))
    row = tokens.find(first)
    assert row is not None
    assert (row.id, row.tier, row.lapse) == (first.split("_")[1], "owner", None)
    for path in (file, tokens.path):
        assert path.stat().st_mode & 0o777 == 0o600
    assert first not in tokens.path.read_text()
    again = WorkerTokens(str(file))
    again.ensure_first()
    assert read_token(str(file)) == first
    assert len(again.rows) == 1


def test_a_token_that_was_given_out_by_hand_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("wk_0123abcd_" + "7" * 64 + "\n")
    tokens = WorkerTokens(str(file))
    tokens.ensure_first()
    found = tokens.find(read_token(str(file)))
    assert found is not None
    assert found.id == "0123abcd"


def test_revoked_tokens_stay_so_and_others_do_not(tmp_path: Path) -> None:
    here, there = WorkerTokens(str(tmp_path / "token")), WorkerTokens(str(tmp_path / "token"))
    anna, otto = here.create("anna"), here.create("otto")
    assert there.reload()
    assert there.find(anna)
    there.revoke(anna.split("_")[1])
    assert here.reload()
    assert here.find(anna) is None
    assert here.find(otto)
    assert [row.name for row in here.rows if row.revoked] == ["anna"]
    with pytest.raises(NotFound):
        here.revoke("nobody")
    assert here.find("") is None
    assert here.find(anna[:-1]) is None


def test_files_that_hold_something_else_are_refused_without_showing_it(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("my password")
    with pytest.raises(StartupError) as caught:
        read_token(str(file))
    assert "password" not in str(caught.value)
    with pytest.raises(StartupError):
        WorkerTokens(str(file)).ensure_first()
    (tmp_path / "other.workers.json").write_text("{}x")
    with pytest.raises(StartupError):
        WorkerTokens(str(tmp_path / "other"))


def test_a_token_has_terms_that_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = WorkerTokens(str(tmp_path / "token"))
    now = int(time.time())
    token = tokens.create("anna", "open", expires=now + 60, slots=2, models=("org/one",))
    row = WorkerTokens(str(tmp_path / "token")).find(token)
    assert row is not None
    assert (row.tier, row.slots, row.covers("/models/one"), row.covers("org/two")) == ("open", 2, True, False)
    assert tokens.lapse(row.id) is None
    monkeypatch.setattr(time, "time", lambda: now + 61.0)
    assert tokens.find(token) is None
    assert tokens.lapse(row.id) == "the token has expired"
    assert tokens.lapse("nobody") == "the token is not known"


def test_files_of_before_are_read_and_strange_tiers_are_not(tmp_path: Path) -> None:
    path = tmp_path / "token.workers.json"
    path.write_text('[{"id": "1", "name": "a", "sha256": "x", "created": 1, "revoked": null}]')
    assert WorkerTokens(str(tmp_path / "token")).rows[0].tier == "trusted"
    path.write_text('[{"id": "1", "name": "a", "sha256": "x", "created": 1, "revoked": null, "tier": "king"}]')
    with pytest.raises(StartupError, match="king"):
        WorkerTokens(str(tmp_path / "token"))


def test_strangers_get_tokens_within_limits(tmp_path: Path) -> None:
    clock = [0.0]
    tokens = WorkerTokens(str(tmp_path / "token"))
    registrar = Registrar(tokens, lambda: clock[0])
    given = [registrar.register("10.0.0.1") for _ in range(registrar_module.OF_ADDRESS)]
    assert len(set(given)) == len(given)
    assert {row.tier for row in tokens.rows} == {"open"}
    with pytest.raises(RateLimited) as caught:
        registrar.register("10.0.0.1")
    assert caught.value.retry_after == registrar_module.HOUR
    assert tokens.find(registrar.register("10.0.0.2"))
    clock[0] = registrar_module.HOUR
    assert tokens.find(registrar.register("10.0.0.1"))
