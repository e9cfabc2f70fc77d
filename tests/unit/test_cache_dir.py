"""Caches are read only where no other user can have written: in a folder of this user's own, inside any folder."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from headway import cache_dir
from headway.cache_dir import is_kept, opened_folder, opened_private, private_folder
from headway.native.build import build, load_library

OWN = f"headway-{os.geteuid()}"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="files cannot be given away")


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777, 0o1777, 0o2775])
def test_it_is_this_users_alone_whatever_it_is_in(tmp_path: Path, mode: int) -> None:
    parent = tmp_path / "volume"
    parent.mkdir()
    parent.chmod(mode)
    folder = private_folder(parent)
    assert folder == parent / OWN and stat.S_IMODE(folder.stat().st_mode) & 0o777 == 0o700
    assert private_folder(parent) == private_folder(folder) == folder


def test_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CACHE_HOME", "HEADWAY_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value, path in (
        ("HOME", "/home/me", "/home/me/.cache/headway"),
        ("XDG_CACHE_HOME", "/b", "/b/headway"),
        ("HEADWAY_CACHE_DIR", "/a", "/a"),
    ):
        monkeypatch.setenv(name, value)  # each goes before those that are set already
        assert str(cache_dir.cache_dir()) == path


@as_root
def test_a_volume_of_root_with_a_group(tmp_path: Path) -> None:
    """As Kubernetes mounts one for a user with the number 1000 and a group."""
    volume = tmp_path / "volume"
    volume.mkdir()
    os.chown(volume, 0, 2000)
    volume.chmod(0o2775)
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.chdir(volume)
            os.setgroups([2000])
            os.setgid(1000)
            os.setuid(1000)
            folder = private_folder(Path("."))
            (folder / "kept").write_text("mine")
            os.write(write, f"{folder} {is_kept(folder / 'kept')}".encode())
        finally:
            os._exit(0)
    os.close(write)
    assert os.read(read, 100) == b"headway-1000 True"
    os.close(read)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(PermissionError, match="belongs to another user .number 1000.; remove it, or choose a folder"):
        private_folder(volume, "headway-1000")


def test_what_lay_in_a_folder_that_others_could_write_to_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = private_folder(tmp_path)
    (folder / "kept").write_text("of this user")
    folder.chmod(0o750)
    assert (private_folder(tmp_path) / "kept").exists() and not caplog.records, "others could read it"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o2770)
    assert not list(private_folder(tmp_path).iterdir()) and [*tmp_path.iterdir()] == [folder]
    (record,) = caplog.records
    assert "mode 2770" in record.getMessage() and "fsGroupChangePolicy: OnRootMismatch" in record.getMessage()


def test_a_file_system_that_keeps_no_modes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_dir, "_OTHERS_WRITE", stat.S_IWUSR)
    with pytest.raises(PermissionError, match="stays open to other users .mode 0700. on this file system; remove it"):
        private_folder(tmp_path)


@pytest.mark.parametrize(
    "plant",
    [
        lambda own, elsewhere: own.symlink_to(elsewhere),
        lambda own, elsewhere: own.symlink_to(elsewhere / "nowhere"),
        lambda own, elsewhere: own.write_text("a file"),
    ],
    ids=["link", "dangling link", "file"],
)
def test_what_is_no_folder_is_refused(tmp_path: Path, plant: Callable[[Path, Path], None]) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    plant(tmp_path / OWN, elsewhere)
    with pytest.raises(PermissionError, match=f"'{OWN}' in it is no folder, or a link to one") as raised:
        private_folder(tmp_path)
    assert raised.value.filename == str(tmp_path / OWN)
    assert not list(elsewhere.iterdir())


def test_files_that_others_may_have_written_are_not_opened(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_text("kept")
    link.symlink_to(path)
    for mode, is_read in ((0o600, True), (0o644, True), (0o664, False), (0o646, False)):
        path.chmod(mode)
        assert is_kept(path) == is_read
    path.chmod(0o600)
    for other, code in ((link, errno.ELOOP), (tmp_path, errno.EPERM)):
        with pytest.raises(OSError) as raised, opened_private(other):
            pytest.fail("it was opened")
        assert raised.value.errno == code


def test_a_folder_that_is_replaced_while_it_is_open_changes_nothing(tmp_path: Path) -> None:
    folder = private_folder(tmp_path)
    (folder / "kept").write_text("mine")
    (folder / "kept").chmod(0o600)
    with opened_folder(folder) as opened:
        folder.rename(tmp_path / "aside")
        (private_folder(tmp_path) / "kept").write_text("planted")
        with opened_private("kept", folder=opened) as file:
            assert os.read(file, 10) == b"mine"


def test_a_library_in_a_folder_of_others_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither found, where its name is known, nor loaded, where a folder is opened to others behind the search."""
    monkeypatch.setenv("HEADWAY_CACHE_DIR", str(tmp_path))
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; echo compiled > "$2"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    path = build("generic").path
    path.write_text("planted")
    path.chmod(0o666)
    again = build("generic")
    assert again.compiled and again.path == path and path.read_text() == "compiled\n"
    assert not build("generic").compiled
    path.parent.chmod(0o777)
    with pytest.raises(PermissionError, match="other users can write"):
        load_library(path)
