"""The hashes by which a prefix cache knows the units of a prompt.

A hash stands for all tokens up to its unit's end, so two prompts have a hash in common only
if they begin alike. It is keyed with a salt: those with different salts never share pages, and
whoever reads a hash without knowing the salt cannot try out what the prompt was.
"""

from hashlib import blake2b

from tidegate.kvcache.layout import Tokens

TOKEN_BYTES = 4
HASH_BYTES = 16


def unit_hashes(tokens: bytes, unit: Tokens, salt: bytes) -> tuple[bytes, ...]:
    """One hash for each full unit of the tokens, which are little-endian uint32."""
    assert len(tokens) % TOKEN_BYTES == 0 and unit >= 1
    # The salt may be of any length, a key may not.
    hashed = blake2b(digest_size=HASH_BYTES, key=blake2b(salt).digest())
    size = unit * TOKEN_BYTES
    hashes: list[bytes] = []
    for end in range(size, len(tokens) + 1, size):
        hashed.update(memoryview(tokens)[end - size : end])
        hashes.append(hashed.digest())
    return tuple(hashes)
