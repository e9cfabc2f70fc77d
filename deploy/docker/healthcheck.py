"""Exits with 0 if the server in this container serves, else with 1 and the reason, which `docker inspect` shows.

HEALTH_URL is the address to ask, by default http://127.0.0.1:8000/health. Set it if the server has another port, or
TLS: https://127.0.0.1:8000/health. The certificate is not checked, since it names another host than 127.0.0.1.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 4.0


def why_not_healthy(url: str) -> str | None:
    """`None` if the server is healthy."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S, context=context):
            return None
    except urllib.error.HTTPError as error:
        return error.read(500).decode(errors="replace")
    except OSError as error:
        return f"{url}: {error}"


if __name__ == "__main__":
    if (reason := why_not_healthy(os.environ.get("HEALTH_URL", "http://127.0.0.1:8000/health"))) is not None:
        sys.exit(reason)
