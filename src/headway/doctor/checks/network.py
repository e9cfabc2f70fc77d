"""Whether the server can listen, and whether requests find their way."""

from __future__ import annotations

from collections.abc import Iterator

from headway.doctor.facts import Facts
from headway.doctor.findings import Finding, ok, warning

_SUBJECT = "network"
_LOCAL = ("localhost", "127.0.0.1")


def check_network(facts: Facts) -> Iterator[Finding]:
    """The port, and proxies."""
    network = facts.network
    if network.port_problem:
        yield warning(
            _SUBJECT,
            f"The server cannot listen on {network.host}, port {network.port}: {network.port_problem}.",
            "'headway serve' ends with this error.",
            "End what listens there (it may be Headway), or choose another port with --port.",
        )
    else:
        yield ok(_SUBJECT, f"Port {network.port} on {network.host} is free.")
    without = {name.strip().lstrip(".") for name in network.no_proxy.split(",")}
    if network.proxies and "*" not in without and not without.intersection(_LOCAL):
        names = ", ".join(f"{name}={value}" for name, value in network.proxies.items())
        yield warning(
            _SUBJECT,
            f"A proxy is set ({names}), and NO_PROXY does not name this machine.",
            "Clients here, such as OpenAI's, send requests for http://127.0.0.1 to the proxy, which has no answer.",
            "Set NO_PROXY=localhost,127.0.0.1 for them.",
        )
