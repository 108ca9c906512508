"""Whether other machines can reach the store in which ranks find each other.

It has no password: who can connect to it can change what ranks read there, and end their work.
Torch's own store listens on all addresses, whatever MASTER_ADDR says.
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
WORD = 8  # hexadecimal digits that are written in the machine's own byte order


def warn_if_reachable(store: Store) -> None:
    """Called where the store is, or on its machine."""
    if address := reachable_address(store):
        warnings.warn(
            f"the rendezvous store listens on {address}, beyond this machine's loopback, and asks "
            "nobody who they are: on one machine use `stageline run`, which listens on loopback "
            "only; on several, let a firewall keep others away (docs/scaling.md)",
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
    """Of all processes here; nothing on a system that does not tell."""
    for table in map(Path, TABLES):
        if table.exists():
            for line in table.read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                host, port = local.split(":")
                if state == LISTENING:
                    yield _address(host), int(port, 16)


def _address(text: str) -> IPv4Address | IPv6Address:
    """As the kernel prints it.

    >>> str(_address("0100007F")) if sys.byteorder == "little" else "127.0.0.1"
    '127.0.0.1'
    """
    words = (text[start : start + WORD] for start in range(0, len(text), WORD))
    packed = b"".join(int(word, 16).to_bytes(WORD // 2, sys.byteorder) for word in words)
    return IPv4Address(packed) if len(packed) == 4 else IPv6Address(packed)
