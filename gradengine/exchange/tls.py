"""TLS between machines. Both ends show certificates of the group's own authority before either proves the secret."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import socket
import ssl
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar, final

from gradengine.arguments import said
from gradengine.errors import CallerError, HandshakeRefused

T = TypeVar("T")

AUTHORITY, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"  # the names in a Kubernetes secret made by cert-manager
VARIABLE = "GRADENGINE_TLS"
_CERTIFICATE = re.compile(rb"^-----BEGIN CERTIFICATE-----.+?^-----END CERTIFICATE-----", re.DOTALL | re.MULTILINE)
_KINDS = ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT
_RECORD_BYTES = 1 << 14  # bytes that are encrypted at a time at most (RFC 8446, 5.1)
_DO = "pass all ranks tls= folders with certificates of one authority (docs/how-to/tls.md)"


@final
class Certificates:
    """A rank's certificate and its group's authority, which encrypt the rank's connections. Only TLS 1.3 is used.

    Any certificate of the authority is accepted, and the name in it is not checked. Ranks are identified by addresses.
    So use an authority for one group only, or for machines that trust each other.

    Args:
        folder: A folder with ca.crt (the authority's certificate), tls.crt (the rank's) and tls.key (its key, without a
            password), all PEM.

    Attributes:
        folder: The folder.
        own_hash: The SHA-256 of the rank's certificate.

    Raises:
        CallerError: A file is missing or cannot be read, or the key does not belong to the certificate.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            self.folder = Path(folder)
            paths = [self.folder / name for name in (AUTHORITY, CERTIFICATE, KEY)]
            _, shown, _ = (content_of(path, is_secret=path.name == KEY) for path in paths)
            self.own_hash = _hash_of_first(shown)
            self._called, self._calling = (_context(kind, *paths) for kind in _KINDS)
            self._called.num_tickets = 0  # no connection is resumed
        except (OSError, TypeError, ValueError) as fault:
            reason = reason_of(fault) if isinstance(fault, ssl.SSLError) else fault
            what = f"{AUTHORITY}, or {CERTIFICATE} with {KEY}, in {said(str(folder))} cannot be used ({reason})"
            expected = f"PEM, and {KEY} the key of {CERTIFICATE}, without a password"
            raise CallerError(what, expected=expected, do="see docs/how-to/tls.md") from None

    def encrypted(self, connection: socket.socket, *, is_called: bool) -> socket.socket:
        """Return a socket that replaces a connected one and encrypts its data. A Unix socket is returned unchanged.

        The ends show their certificates at the first read or write. If that fails, `refusal_of` returns the reason.
        """
        if connection.family == socket.AF_UNIX:
            return connection
        context = self._called if is_called else self._calling
        encrypted = context.wrap_socket(connection, server_side=is_called, do_handshake_on_connect=False)
        assert isinstance(encrypted, _TlsSocket)  # noqa: S101  (the context's class)
        encrypted.own_hash = self.own_hash
        return encrypted


def certificates_of(folder: str | os.PathLike[str] | None) -> Certificates | None:
    """Return the certificates in a folder. If it is None, use GRADENGINE_TLS. Without either, return None."""
    folder = folder if folder is not None else os.environ.get(VARIABLE) or None
    return None if folder is None else Certificates(folder)


def content_of(path: Path, *, is_secret: bool = False) -> bytes:
    """Return a file's content, and log a warning if other users can open a secret file.

    This is not an error, because Kubernetes mounts secrets with such a mode.
    """
    found = path.stat()
    if is_secret and found.st_mode & 0o077:
        warning = "other users can open the secret file %r (mode %o); run chmod 600 on it"
        logging.getLogger("gradengine.exchange").warning(warning, str(path), found.st_mode & 0o777)
    return path.read_bytes()


def hashes_of(connection: socket.socket) -> bytes:
    """Return the SHA-256 of a TLS connection's two certificates, the caller's first. Empty for a plain connection."""
    if not isinstance(connection, _TlsSocket):
        return b""
    theirs = hashlib.sha256(connection.getpeercert(binary_form=True) or b"").digest()
    return theirs + connection.own_hash if connection.server_side else connection.own_hash + theirs


def refusal_of(fault: OSError, who: str) -> HandshakeRefused | None:
    """Return the refusal of `who` if an error of a socket is a failure of TLS. Return None for any other error."""
    if not isinstance(fault, ssl.SSLError) or isinstance(fault, ssl.SSLEOFError):
        return None
    return HandshakeRefused(f"TLS with {who} failed ({reason_of(fault)})", do=_DO)


def reason_of(fault: OSError) -> str:
    """Return the reason of a socket's error, or of a TLS error, in few words."""
    if isinstance(fault, ssl.SSLCertVerificationError):
        return f"its certificate is rejected: {fault.verify_message}"
    reason = getattr(fault, "reason", None)
    if reason == "WRONG_VERSION_NUMBER":  # the first bytes are not TLS
        return "it does not speak TLS"
    return str(reason).replace("_", " ").lower() if reason else str(fault.strerror or fault)


def _context(kind: int, authority: Path, shown: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(kind)
    context.sslsocket_class = _TlsSocket
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
    context.load_verify_locations(authority)
    context.load_cert_chain(shown, key, password="")  # without a password OpenSSL would prompt on the terminal
    return context


def _hash_of_first(content: bytes) -> bytes:
    """Return the SHA-256 of a file's first certificate, which OpenSSL shows. The other certificates are its chain."""
    first = _CERTIFICATE.search(content)
    if first is None:
        raise ValueError(f"no certificate in {CERTIFICATE}")
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(first[0].decode())).digest()


@final
class _TlsSocket(ssl.SSLSocket):
    """An encrypted socket whose methods behave like those of a plain socket."""

    own_hash: bytes  # the SHA-256 of this end's certificate

    def send(self, data: Any, flags: int = 0) -> int:
        return _or_blocking(super().send, data, flags)

    def sendmsg(self, parts: Iterable[Any], ancillary: Sequence[Any] = (), *_: Any) -> int:  # type: ignore[override]
        """Send the parts' first bytes, at most one record. If the socket is full, call again with the same parts."""
        record = bytearray()
        for part in parts:
            record += part[: _RECORD_BYTES - len(record)]
        return self.send(record)

    def recv(self, size: int = 1024, flags: int = 0) -> bytes:
        return _or_blocking(super().recv, size)

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        return _or_blocking(super().recv_into, buffer, nbytes, flags)


def _or_blocking(call: Callable[..., T], *given: Any) -> T:
    """Call a method. Raises `BlockingIOError`, as a plain socket does, if OpenSSL has to wait."""
    try:
        return call(*given)
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
        raise BlockingIOError from None
