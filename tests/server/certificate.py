"""A certificate of one's own, for tests over TLS."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def made(where: Path, *, subject: str = "/CN=localhost") -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 and its key, as PEM files."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    certificate, key = where / "cert.pem", where / "key.pem"
    subprocess.run(
        ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", subject,
         "-addext", "subjectAltName=IP:127.0.0.1"),
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key
