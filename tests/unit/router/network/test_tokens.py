"""Worker tokens: only hashes are kept, and what is revoked is so for every process."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace._common.errors import NotFound, StartupError
from headrace_router.network.tokens import WorkerTokens, read_token


def test_the_first_token_is_written_once(tmp_path: Path) -> None:
    file = tmp_path / "token"
    tokens = WorkerTokens(str(file))
    tokens.ensure_first()
    first = read_token(str(file))
    assert tokens.find(first) == first.split("_")[1]
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
    assert tokens.find(read_token(str(file))) == "0123abcd"


def test_revoked_tokens_stay_so_and_others_do_not(tmp_path: Path) -> None:
    here, there = WorkerTokens(str(tmp_path / "token")), WorkerTokens(str(tmp_path / "token"))
    anna, otto = here.create("anna"), here.create("otto")
    assert there.reload()
    assert there.find(anna)
    there.revoke(anna.split("_")[1])
    assert here.reload()
    assert here.find(anna) is None
    assert here.find(otto)
    assert [row["name"] for row in here.rows if row["revoked"]] == ["anna"]
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
