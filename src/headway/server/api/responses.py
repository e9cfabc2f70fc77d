"""Records as Starlette responses."""

from __future__ import annotations

import msgspec
from starlette.responses import Response


def json_response(answer: msgspec.Struct, *, status: int = 200) -> Response:
    """A record as JSON."""
    return Response(msgspec.json.encode(answer), status_code=status, media_type="application/json")
