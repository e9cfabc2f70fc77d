"""Asks a server for one answer and prints it: `helm test` runs it in a pod beside the service.

    python ask.py http://headway:8000

API_KEYS may hold API keys, one on each line; the first is used. Certificates are not checked: this asks whether the
service answers, not who it is.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 120.0


def ask(url: str, keys: str = "") -> str:
    """The text of the answer. Raises `OSError` if there is none."""
    headers = {"content-type": "application/json"}
    key = next((line.strip() for line in keys.splitlines() if line.strip() and not line.startswith("#")), None)
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    body = json.dumps({"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}).encode()
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    request = urllib.request.Request(f"{url}/v1/completions", data=body, headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as answer:
        return str(json.load(answer)["choices"][0]["text"])


if __name__ == "__main__":
    try:
        print(ask(sys.argv[1], os.environ.get("API_KEYS", "")))
    except urllib.error.HTTPError as error:
        sys.exit(f"{error.status}: {error.read(2000).decode(errors='replace')}")
    except OSError as error:
        sys.exit(f"{sys.argv[1]}: {error}")
