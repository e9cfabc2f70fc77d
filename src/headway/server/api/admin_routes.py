"""The endpoints for operators, with `--enable-admin-routes`: the settled configuration, and a reset of the caches."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headway import __version__
from headway.server.api.api_errors import ApiError, bad_request
from headway.server.api.response_models import json_response
from headway.server.server_config import ServerConfig
from headway.server.services import Services

_FLAGS = {"true": True, "1": True, "false": False, "0": False}
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]*@")
"""The user and the password in a URL."""


class ServerInfo(msgspec.Struct):
    """What runs here, and with which options. It has no secrets."""

    version: str
    models: list[str]
    engine: dict[str, Any]
    """What the engine has settled, such as the number of KV blocks. Empty while no engine has been ready."""
    engine_options: dict[str, Any]
    server_options: dict[str, Any]
    """Of secrets, only how many there are."""


class CacheResetOutcome(msgspec.Struct):
    """What a reset of the prefix caches did."""

    success: bool
    """Whether the caches are empty. They are not if requests run, whose blocks stay cached."""
    num_forgotten_blocks: int
    num_kept_blocks: int


class AdminRoutes:
    """GET /server_info and POST /reset_prefix_cache."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def server_info(self, _: Request) -> Response:
        """GET /server_info."""
        self._check_enabled()
        services, info = self._services, self._services.engine.info
        return json_response(
            ServerInfo(
                __version__,
                list(services.model_names),
                engine={} if info is None else _shown(msgspec.structs.asdict(info)),
                engine_options=_shown(services.engine_options),
                server_options=_shown(dataclasses.asdict(services.config) | _secrets(services.config)),
            )
        )

    async def reset_prefix_cache(self, request: Request) -> Response:
        """POST /reset_prefix_cache."""
        self._check_enabled()
        flags = _flags(request.query_params)
        if flags.get("reset_running_requests"):
            raise bad_request(
                "'reset_running_requests' is not supported by this server: running requests keep their blocks.",
                param="reset_running_requests",
                code="unsupported_field",
            )
        if not self._services.info.prefix_caching:
            raise ApiError(
                404,
                "There is no prefix cache to reset: the server was started with --no-enable-prefix-caching.",
                code="prefix_caching_off",
            )
        outcome = await self._services.engine.reset_caches(with_disk=flags.get("reset_external", False))
        return json_response(CacheResetOutcome(not outcome.num_kept, outcome.num_forgotten, outcome.num_kept))

    def _check_enabled(self) -> None:
        if not self._services.config.enable_admin_routes:
            raise ApiError(404, "This server was started without --enable-admin-routes.", code="admin_routes_off")


def _flags(query: Mapping[str, str]) -> dict[str, bool]:
    """Return the flags of a query by name."""
    flags = {}
    for name, text in query.items():
        if name not in ("reset_external", "reset_running_requests"):
            raise bad_request(
                f"Unknown parameter '{name[:80]}'; there are 'reset_external' and 'reset_running_requests'.",
                param=name[:80],
                code="unknown_field",
            )
        if (value := _FLAGS.get(text.lower())) is None:
            raise bad_request(f"'{name}' must be true or false, not '{text[:80]}'.", param=name)
        flags[name] = value
    return flags


def _secrets(config: ServerConfig) -> dict[str, int]:
    """Return the number of values of each option that is secret."""
    names = [each.name for each in dataclasses.fields(config) if each.metadata.get("is_secret")]
    return {name: len(getattr(config, name)) for name in names}


def _shown(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as JSON knows them, without credentials in URLs."""
    return {
        name: _CREDENTIALS.sub("***@", value) if isinstance(value, str) else msgspec.to_builtins(value, enc_hook=str)
        for name, value in values.items()
    }
