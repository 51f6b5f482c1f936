"""For whom an HTTP request is made: a header says so, or the API key.

The proxy checks no keys and believes what it is told. Whoever is not to choose for itself is
kept apart by what stands in front of the proxy, which sets the header.
"""

import hashlib
import re

from tidegate.clients.proxy.errors import ApiError
from tidegate.clients.proxy.exchange import Exchange

TENANT_HEADER = b"x-tidegate-tenant"
KEY_DIGEST_BYTES = 6
_NAME = re.compile(rb"[!-~](?:[ -~]{0,254}[!-~])?")
_NO_KEYS = (b"", b"none", b"EMPTY")  # What clients send that must send some key.


def tenant_of(exchange: Exchange) -> str:
    """The tenant's name; empty without one. Raises `ApiError` 400 for a header that is none.

    That of an API key is `key-` and a hash of it, which the log may show.
    """
    name = exchange.header(TENANT_HEADER)
    if name:
        if not _NAME.fullmatch(name):
            raise ApiError(
                400,
                "the header X-Tidegate-Tenant must have 1 to 256 visible ASCII characters",
                code="bad_header",
            )
        return name.decode()
    scheme, _, key = exchange.header(b"authorization").partition(b" ")
    key = key.strip()
    if scheme.lower() != b"bearer" or key in _NO_KEYS:
        return ""
    digest = hashlib.blake2b(key, digest_size=KEY_DIGEST_BYTES)
    return f"key-{digest.hexdigest()}"
