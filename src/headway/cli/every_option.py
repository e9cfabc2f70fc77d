"""Every option that a configuration file and the environment can set: those of the server and of the engine."""

from __future__ import annotations

import dataclasses

from headway.console.flags import FlagSpec, engine_flags, option_flag


def server_flags() -> list[FlagSpec]:
    """Every option of the server."""
    from headway.server.server_config import ServerConfig  # most commands know their own options without it

    return [option_flag(ServerConfig, field) for field in dataclasses.fields(ServerConfig)]


def every_option() -> list[FlagSpec]:
    """The options of the server, then those of the engine."""
    return [*server_flags(), *engine_flags()]
