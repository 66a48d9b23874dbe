"""Names allowed in the Host header of a request to one of our servers.

A page of another site can make its own name resolve to this machine (DNS rebinding) and then read the answers. Such a
request has the site's name as its Host, so unknown names are refused. An IP address cannot be rebound.
"""

import ipaddress
import re
import socket
from collections.abc import Collection, Sequence

from thresher.common.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,252})", re.ASCII)
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]{1,254}))(?::\d{1,5})?", re.ASCII)


def host_allowed(headers: Sequence[str], names: Collection[str] = ()) -> bool:
    """Return whether the one Host header is an IP address, localhost, or one of `names`; a port may follow."""
    found = _HOST.fullmatch(headers[0]) if len(headers) == 1 else None
    if found is None:
        return False
    name = _same(found[1] or found[2])
    return name == "localhost" or name in names or _is_address(name)


def server_names(host: str, allowed: Collection[str] = ()) -> frozenset[str]:
    """Return the names of a server that listens on `host`: `host`, those of this machine, and those of --allow-host."""
    for name in allowed:
        if not _NAME.fullmatch(name):
            raise UserError(f"--allow-host {name!r}: expected a host name without a port, such as node17.example.org")
    own = socket.gethostname()
    return frozenset(_same(name) for name in (host, own, own.partition(".")[0], *allowed) if name)


def _same(name: str) -> str:
    return name.lower().rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
