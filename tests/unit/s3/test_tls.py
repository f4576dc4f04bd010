"""The same server behind TLS."""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvstore.errors import BackendUnavailableError
from tests.faults.s3_faults import Fault, S3FaultServer
from tests.unit.s3.conftest import BUCKET, opened
from tests.unit.s3.objects import call, read, write


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of 127.0.0.1 with its key, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvstore test")])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = tmp_path_factory.mktemp("tls") / "certificate.pem"
    path.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return path


@pytest.fixture(scope="module")
def server(certificate: Path) -> Iterator[S3FaultServer]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with S3FaultServer(BUCKET, tls=context) as server:
        yield server


def test_objects_travel_over_tls(server: S3FaultServer, certificate: Path, path: str) -> None:
    medium = opened(server.url, data_path=path, ca_bundle=str(certificate))
    assert medium.describe()["data path"] == path
    data = os.urandom(1_000_000)
    assert medium.write("aa/k", [b"head", memoryview(data)], call(), once=False, blocks=2)
    assert server.requests("PUT", "aa/k")[-1].headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert read(medium, "aa/k") == b"head" + data
    assert read(medium, "aa/k", 3, 500_000) == (b"head" + data)[3:500_000]
    assert read(medium, "aa/none") is None
    with server.faulty(Fault("truncate", ("GET",), times=1)):
        assert read(medium, "aa/k", 4) == data
    server.close_idle()
    assert write(medium, "aa/k", b"after")
    medium.close()


def test_an_unknown_certificate_is_refused(server: S3FaultServer, path: str) -> None:
    with pytest.raises(BackendUnavailableError, match="certificate"):
        opened(server.url, data_path=path)


@pytest.mark.filterwarnings("ignore::urllib3.exceptions.InsecureRequestWarning")  # that is what was asked for
def test_verification_can_be_switched_off(server: S3FaultServer, path: str) -> None:
    medium = opened(server.url, data_path=path, verify=False)
    assert write(medium, "aa/k", b"x")
    assert read(medium, "aa/k") == b"x"
    medium.close()


def test_the_bundle_of_the_aws_configuration_is_trusted(
    server: S3FaultServer, certificate: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    medium = opened(server.url, data_path=path)
    assert write(medium, "aa/k", b"x")
    medium.close()
