"""Certificates for tests, made with the ``openssl`` command in a few milliseconds each."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from holdfast.cluster.tls import TlsSettings

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


class Certificates:
    """CAs and certificates in a folder: ``NAME.pem`` and ``NAME.key``. Without ``openssl`` the test is skipped."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("certificates are made with the openssl command, which is not here")
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def authority(self, name: str) -> None:
        self._openssl("req", "-x509", *_KEY, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")

    def issue(
        self, name: str, authority: str, *, names: str = "IP:127.0.0.1", days: int = 30, subject: str = ""
    ) -> None:
        """A certificate for these names; with negative ``days`` one that has expired. ``subject``: no CommonName."""
        (self.folder / f"{name}.ext").write_text(f"subjectAltName={names}\n")
        self._openssl("req", *_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", subject or f"/CN={name}")
        signed = ("-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial", "-days", str(days))
        self._openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-extfile", f"{name}.ext", "-out", f"{name}.pem")

    def lock(self, name: str) -> None:
        """A copy ``NAME-locked.key`` with a passphrase."""
        self._openssl("ec", "-in", f"{name}.key", "-out", f"{name}-locked.key", "-aes128", "-passout", "pass:secret")

    def settings(self, name: str, authority: str, *, server: str = "127.0.0.1") -> TlsSettings:
        path = self.folder / name
        return TlsSettings(cert=f"{path}.pem", key=f"{path}.key", ca=str(self.folder / f"{authority}.pem"), name=server)

    def options(self, name: str, authority: str) -> list[str]:
        """The options of ``holdfast run``."""
        made = self.settings(name, authority)
        return ["--tls-cert", made.cert, "--tls-key", made.key, "--tls-ca", made.ca]

    def _openssl(self, *words: str) -> None:
        subprocess.run(["openssl", *words], cwd=self.folder, check=True, capture_output=True)


def standard(folder: Path) -> Certificates:
    """``head``, ``other``, ``expired`` and ``elsewhere`` (another name) of ``ca``, and ``stranger`` of ``their-ca``."""
    made = Certificates(folder)
    made.authority("ca")
    made.authority("their-ca")
    made.issue("head", "ca", names="IP:127.0.0.1,DNS:head")
    made.issue("other", "ca", names="DNS:any-name")
    made.issue("expired", "ca", days=-1)
    made.issue("elsewhere", "ca", names="IP:10.9.9.9,DNS:elsewhere")
    made.issue("stranger", "their-ca")
    made.lock("head")
    return made
