"""Private folders and the cache."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace._common.errors import StartupError
from headrace_launcher import private


def test_a_private_folder_is_private_and_goes(tmp_path: Path) -> None:
    with private.private_folder(str(tmp_path)) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "socket").touch()
    assert list(tmp_path.iterdir()) == []


def test_folders_of_killed_processes_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom headrace_launcher import private\n"
        "with private.private_folder(sys.argv[1]) as folder:\n    os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert len(list(tmp_path.iterdir())) == 1
    (tmp_path / "headrace-somebody-else").mkdir()
    with private.private_folder(str(tmp_path)) as first, private.private_folder(str(tmp_path)) as second:
        assert {p.name for p in tmp_path.iterdir()} == {first.name, second.name, "headrace-somebody-else"}


def test_an_unusable_base_is_one_line() -> None:
    with pytest.raises(StartupError, match="/proc/no/such"), private.private_folder("/proc/no/such"):
        pass


def test_the_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HEADRACE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert private.cache_root() == tmp_path / "home/.cache/headrace"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert private.cache_root() == tmp_path / "xdg/headrace"
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "own"))
    assert private.cache_root() == tmp_path / "own"


def test_without_a_writable_home_models_go_to_a_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/proc/nohome")
    monkeypatch.delenv("HEADRACE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    warnings: list[str] = []
    with contextlib.ExitStack() as stack:
        caches = private.CacheProvider(stack, warnings.append)
        assert warnings == []
        assert caches.writable().models.is_dir()
        assert caches.writable().root.parent == tmp_path
        assert len(warnings) == 1
    assert os.listdir(tmp_path) == []


def test_a_failed_new_folder_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with private.new_folder(tmp_path / "made") as scratch:
            (scratch / "file").touch()
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        fail()
    assert list(tmp_path.iterdir()) == []
