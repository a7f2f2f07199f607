"""The daemon's log: its bounds, its readers, and how it is read while it grows."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from ssmd.daemon import logfile
from ssmd.daemon.logfile import BEFORE, FILE, LogFile, Reader


def write(file: LogFile, text: str) -> None:
    file.handle(logging.LogRecord("made", logging.WARNING, "", 0, text, (), None))


def said(lines: list[str]) -> list[str]:
    """Without the time."""
    return [line.partition(" made: ")[2] for line in lines]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log of few lines, each of 60 bytes or so."""
    monkeypatch.setattr(logfile, "MOST_BYTES", 600)


@pytest.mark.usefixtures("small")
def test_it_has_two_files_of_a_bounded_size(tmp_path: Path) -> None:
    file = LogFile(tmp_path)
    for number in range(200):
        write(file, f"line {number}")
    write(file, "x" * 5000)
    for name in (FILE, BEFORE):
        assert 0 < (tmp_path / name).stat().st_size < 5000
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(tmp_path)) == [FILE, BEFORE]
    file.close()


def test_a_line_for_each_record(tmp_path: Path) -> None:
    file = LogFile(tmp_path)
    write(file, "one\ntwo\x1b[2J\udcff")
    file.note("began")
    file.close()
    first, second = Reader(tmp_path).last(9)
    assert first.endswith(" WARNING made: one\\ntwo\\x1b[2J\\udcff")
    assert second.endswith(" INFO ssmd: began")


@pytest.mark.usefixtures("small")
def test_the_last_lines(tmp_path: Path) -> None:
    file = LogFile(tmp_path)
    with pytest.raises(FileNotFoundError):
        Reader(tmp_path / "none").last(3)
    assert Reader(tmp_path).last(3) == []
    for number in range(20):
        write(file, f"line {number}")
    assert (tmp_path / BEFORE).exists()
    assert said(Reader(tmp_path).last(3)) == ["line 17", "line 18", "line 19"]
    assert Reader(tmp_path).last(0) == []
    across = said(Reader(tmp_path).last(12))
    assert across == [f"line {number}" for number in range(8, 20)]
    file.close()


@pytest.mark.usefixtures("small")
def test_what_comes_is_read_once(tmp_path: Path) -> None:
    """Also where the file is full meanwhile and another takes its place."""
    file = LogFile(tmp_path)
    write(file, "line 0")
    reader = Reader(tmp_path)
    found = said(reader.last(9))
    for number in range(1, 60):
        write(file, f"line {number}")
        if number % 3 == 2:
            found += said(list(reader.more()))
    with (tmp_path / FILE).open("a") as half:
        half.write("2026 made: half")
        half.flush()
        assert said(list(reader.more())) == []
        half.write(" a line\n")
    assert said(list(reader.more())) == ["half a line"]
    assert found == [f"line {number}" for number in range(60)]
    file.close()


@pytest.mark.usefixtures("small")
def test_of_a_file_without_end_the_last_part_is_read(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("x" * 5000 + "\nlast\n")
    assert Reader(tmp_path).last(1) == ["last"]
    assert len(Reader(tmp_path).last(2)[0]) < 1200


def test_what_lies_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("")
    (tmp_path / FILE).symlink_to(tmp_path / "elsewhere")
    for use in (lambda: LogFile(tmp_path), lambda: Reader(tmp_path).last(1)):
        with pytest.raises(OSError, match="symbolic"):
            use()
    (tmp_path / FILE).unlink()
    os.mkfifo(tmp_path / FILE)
    for use in (lambda: LogFile(tmp_path), lambda: Reader(tmp_path).last(1)):
        with pytest.raises(OSError, match=r"not a regular file|No such device"):
            use()
    assert (tmp_path / "elsewhere").read_text() == ""


def test_one_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("old\n")
    (tmp_path / FILE).chmod(0o644)
    LogFile(tmp_path).close()
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_a_full_disk_costs_lines_and_nothing_else(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = LogFile(tmp_path)
    assert file.stream is not None
    file.stream.close()
    file.stream = open("/dev/full", "w")  # noqa: SIM115 - the handler closes it
    write(file, "line")
    file.close()
    assert capfd.readouterr().err == ""
