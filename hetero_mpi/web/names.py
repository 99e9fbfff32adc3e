"""Under which names a server may be asked.

Browsers let every page of the web send requests to this machine, and by a name of its own that points here (DNS rebinding) read
the answers. Such requests carry another name in Host, or the page's in Origin; programs that are no browsers are not hindered.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil

LOCAL = ("127.0.0.1", "::1", "localhost")
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/?#@\[\]]+)(:\d*)?", re.IGNORECASE)


@dataclass(frozen=True)
class Names:
    """``own``: names and addresses in small letters. ``more``: those that the user has named besides."""

    own: frozenset[str]
    more: frozenset[str] = frozenset()

    @classmethod
    def of(cls, address: str, more: Iterable[str] = ()) -> Names:
        """For a server that listens on ``address``: those of this machine where it can be reached from others."""
        wider = _machine() if address not in LOCAL else ()
        return cls(frozenset(map(_plain, (*LOCAL, address, *wider))), frozenset(map(_plain, more)))

    def has_host(self, host: str) -> bool:
        """``host``: the value of a Host header."""
        found = _HOST.fullmatch(host)
        return found is not None and _plain(found[1]) in self.own | self.more

    def has_origin(self, origin: str, host: str) -> bool:
        """Does a page of ``origin`` come from here? ``host``: what its request has in Host."""
        try:
            address = urlsplit(origin)
            return address.netloc.lower() == host.lower() or (address.hostname or "") in self.more
        except ValueError:
            return False


def _plain(name: str) -> str:
    return name.strip("[]").partition("%")[0].rstrip(".").lower()


def _machine() -> list[str]:
    """This machine's names and addresses."""
    name = socket.gethostname()
    addresses = [one.address for some in psutil.net_if_addrs().values() for one in some]
    return [name, name.partition(".")[0], f"{name.partition('.')[0]}.local", socket.getfqdn(), *addresses]
