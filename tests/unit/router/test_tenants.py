"""The table from API key to tenant."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from headrace._common.errors import StartupError, Unauthorized
from headrace_router.keys_file import KeysFile
from headrace_router.tenants import ANONYMOUS, DEFAULT, Tenants


def test_a_key_of_the_command_line() -> None:
    assert Tenants("SeCrEt").find(["other", "SeCrEt"]) is DEFAULT
    assert not Tenants("SeCrEt").open


@pytest.mark.parametrize("key", ["", "secret", "SeCrE", "SeCrEtX", " SeCrEt", "SeCrEt ", "\udcff"])
def test_the_key_is_exact(key: str) -> None:
    with pytest.raises(Unauthorized):
        Tenants("SeCrEt").find([key])


def test_no_key_is_given() -> None:
    with pytest.raises(Unauthorized):
        Tenants("SeCrEt").find([])


def test_without_keys_everybody_may() -> None:
    assert Tenants(None).find([]) is ANONYMOUS
    assert Tenants("").find(["x"]) is ANONYMOUS


def write(path: Path, text: str) -> None:
    """As editors and deployments do: a new file in the place of the old one."""
    new = path.with_suffix(".new")
    new.write_text(text, "utf-8")
    new.chmod(0o600)
    os.replace(new, path)


ONE = '[tenants.one]\nkeys = ["k1"]\n'
TWO = '[tenants.two]\nkeys = ["k2"]\n'


def test_the_file_is_read_again_when_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "keys.toml"
    write(path, ONE)
    tenants = Tenants("own", KeysFile(str(path)))
    assert tenants.find(["k1"]).name == "one"
    tenants.reload()
    assert not caplog.records
    write(path, TWO)
    tenants.reload()
    assert tenants.find(["k2"]).name == "two"
    assert tenants.find(["own"]) is DEFAULT
    with pytest.raises(Unauthorized):
        tenants.find(["k1"])
    assert [r.getMessage() for r in caplog.records] == ["API keys reloaded: 1 keys of 1 tenants"]


@pytest.mark.parametrize("broken", ["[tenants.x", "", '[tenants.x]\nkeys = ["k3"]\nrpm = 5\n', None])
def test_what_is_not_usable_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str | None) -> None:
    path = tmp_path / "keys.toml"
    write(path, ONE)
    tenants = Tenants(None, KeysFile(str(path)))
    if broken is None:
        path.unlink()
    else:
        write(path, broken)
    for _ in range(3):
        tenants.reload()
    assert tenants.find(["k1"]).name == "one"
    assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 1
    assert str(path) in caplog.text
    write(path, TWO)
    tenants.reload()
    assert tenants.find(["k2"]).name == "two"


def test_a_missing_file_is_an_error_at_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"--api-keys-file .*nowhere: No such file"):
        Tenants(None, KeysFile(str(tmp_path / "nowhere")))
    with pytest.raises(StartupError, match="directory"):
        Tenants(None, KeysFile(str(tmp_path)))


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_file_that_everybody_can_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warned: bool
) -> None:
    path = tmp_path / "keys.toml"
    write(path, ONE)
    path.chmod(mode)
    KeysFile(str(path)).read()
    assert ("can be read by everybody" in caplog.text) == warned
