"""Venvs from pins: made once, made anew when the pins change, and a reason in words when they cannot be made."""

from __future__ import annotations

import hashlib
import zipfile
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest

from holdfast.study import install


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A package that needs no registry."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    files = {
        "tiny.py": "VALUE = 7\n",
        "tiny-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
        "tiny-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},{_hash(text)},{len(text)}\n" for name, text in files.items())
    with zipfile.ZipFile(folder / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in {**files, "tiny-1.0.dist-info/RECORD": f"{record}tiny-1.0.dist-info/RECORD,,\n"}.items():
            wheel.writestr(name, text)
    return folder


def _hash(text: str) -> str:
    return "sha256=" + urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def test_pins_are_installed_once_and_anew_when_they_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], say: object, log: Path) -> list[str] | None:
        ran.append(command)
        (tmp_path / "chainer").mkdir(exist_ok=True)
        return ["ERROR: No matching distribution found for tiny==2.0"] if "tiny==2.0" in command else None

    monkeypatch.setattr(install, "_run", run)
    monkeypatch.setitem(install.PINS, "chainer", (("tiny==1.0",),))
    first = install.ensure("chainer", print, root=tmp_path)
    assert first.python is not None
    assert [command[-1] for command in ran] == [str(tmp_path / "chainer"), "tiny==1.0"], "a venv, then pip"
    again = install.ensure("chainer", print, root=tmp_path)
    assert (again.python, len(ran)) == (first.python, 2)

    monkeypatch.setitem(install.PINS, "chainer", (("tiny==2.0",),))
    found = install.ensure("chainer", print, root=tmp_path)
    assert found.python is None, "what the old pins made must not be used"
    assert "tiny==2.0" in found.why
    assert str(tmp_path / "chainer.log") in found.why, "the whole story is in the log"


@pytest.mark.thorough("the test above does the same with a pip that is not real")
def test_a_venv_is_made_once_and_anew_for_other_pins(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("--no-index", "--find-links", str(wheels))
    monkeypatch.setitem(install.PINS, "chainer", ((*given, "tiny==1.0"),))
    said: list[str] = []
    first = install.ensure("chainer", said.append, root=tmp_path)
    assert first.python is not None, first.why
    assert first.why == "made now"
    assert any("tiny==1.0" in text for text in said), said
    assert list((tmp_path / "chainer").rglob("tiny.py"))
    again = install.ensure("chainer", said.append, root=tmp_path)
    assert (again.why, again.python) == ("made before", first.python)

    monkeypatch.setitem(install.PINS, "chainer", ((*given, "tiny==2.0"),))
    found = install.ensure("chainer", print, root=tmp_path)
    assert found.python is None, "what the old pins made must not be used"
    assert "No matching distribution found for tiny==2.0" in found.why
    assert str(tmp_path / "chainer.log") in found.why, "the whole story is in the log"
    assert "tiny" in (tmp_path / "chainer.log").read_text()


def test_an_interrupted_install_is_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(install, "_run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        install.ensure("jax", print, root=tmp_path)
    assert not (tmp_path / "jax" / "ready").exists()


def test_holdfast_needs_none() -> None:
    found = install.ensure("holdfast", print)
    assert found.python is not None
    assert found.python.exists()
