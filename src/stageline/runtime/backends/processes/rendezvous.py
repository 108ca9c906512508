"""Check whether other machines can reach the rendezvous store.

The store has no password: whoever can connect to it can change what ranks read there, and stop
them. Torch's own store listens on all addresses, whatever MASTER_ADDR is.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # in its docs

TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
LISTENING = "0A"
WORD = 8  # hexadecimal digits, which are in the machine's own byte order


def warn_if_reachable(store: Store) -> None:
    """Warn if other machines can reach the store; call it on the machine that has the store."""
    if address := reachable_address(store):
        warnings.warn(
            f"the rendezvous store listens on {address}, beyond this machine's loopback, without "
            "authentication: on one machine use `stageline run`, which listens on loopback only; "
            "on several, block other hosts with a firewall (docs/scaling.md)",
            RuntimeWarning,
            stacklevel=2,
        )


def reachable_address(store: Store) -> str | None:
    """Return an address beyond loopback at which the store listens on this machine, if any."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return None
    for address, port in _listening():
        mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
        if port == store.port and not (mapped or address).is_loopback:
            return f"{address}, port {port}"
    return None


def _listening() -> Iterator[tuple[IPv4Address | IPv6Address, int]]:
    """Yield the addresses and ports that processes listen on; none on systems other than Linux."""
    for table in map(Path, TABLES):
        if table.exists():
            for line in table.read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                host, port = local.split(":")
                if state == LISTENING:
                    yield _address(host), int(port, 16)


def _address(text: str) -> IPv4Address | IPv6Address:
    """Parse an address as the kernel prints it.

    >>> str(_address("0100007F")) if sys.byteorder == "little" else "127.0.0.1"
    '127.0.0.1'
    """
    words = (text[start : start + WORD] for start in range(0, len(text), WORD))
    packed = b"".join(int(word, 16).to_bytes(WORD // 2, sys.byteorder) for word in words)
    return IPv4Address(packed) if len(packed) == 4 else IPv6Address(packed)
