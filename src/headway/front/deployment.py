"""Defines a front end's engines: how many there are, where they run, and the role of each."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, Protocol

from headway.errors import ConfigError
from headway.front.placement import EngineSpec, divide, with_roles
from headway.front.roles import Roles
from headway.front.router import Router
from headway.front.scaling import ScalingRule
from headway.wire.messages import BlockExchange


class Cluster(Protocol):
    """Machines that run engines."""

    def specs(self, spec: EngineSpec, num_replicas: int) -> list[EngineSpec]:
        """One spec per replica."""


class Deployment:
    """The engines of a front end. It does not change later; conflicting arguments raise `ConfigError`."""

    def __init__(
        self,
        options: Mapping[str, Any] | None = None,
        *,
        factory: str | None = None,
        log_level: str = "INFO",
        num_replicas: int = 1,
        scaling: ScalingRule | None = None,
        router: str = "prefix-aware",
        reports_caches: bool = False,
        reports_tokens: bool = False,
        roles: Roles | None = None,
        carrier: Literal["auto", "tcp"] = "auto",
        cluster: Cluster | None = None,
    ) -> None:
        """`options` are those of `EngineConfig`, flat. `factory` names another engine (see `engine_process`) and may
        accept other options. `num_replicas` engines run on this machine or on a `cluster`; with `scaling` this is the
        initial number. `reports_caches`: replicas report the content of their prefix caches even if the router does not
        need it, so that it can be followed; with `reports_tokens` also the tokens of the blocks. `roles` divides
        prefill and decode and replaces `num_replicas`. `carrier`: how their blocks travel, as in `BlockExchange`;
        between machines it is TCP."""
        if roles is not None and scaling is not None:
            raise ConfigError("roles are for a fixed number of replicas, without scaling.")
        if roles is not None and sys.platform != "linux":
            raise ConfigError("roles need Linux, for the memory that engine processes share.")
        self.num_started = num_replicas if roles is None else roles.num_replicas
        """The number of replicas that are started at the beginning."""
        self.scaling = scaling
        self._router = router
        self._is_apart = roles is not None
        most = self.num_started if scaling is None else scaling.most
        if not (1 if scaling is None else scaling.least) <= self.num_started <= most:
            raise ConfigError(
                f"There must be at least one replica, within the limits of scaling, not {self.num_started}."
            )
        needs_reports = self.create_router().needs_digests and (most > 1 or roles is not None)
        # Front ends apply the template. Engines get tokens, and may run where there is no such file.
        engine_options = {name: value for name, value in (options or {}).items() if name != "chat_template"}
        spec = EngineSpec(
            engine_options,
            factory,
            log_level,
            reports_cache=reports_caches or reports_tokens or needs_reports,
            reports_tokens=reports_tokens,
        )
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        place = divide if cluster is None else cluster.specs
        if roles is None:
            self.specs = place(spec, most)
            """The specs of all replicas that there can be."""
            return
        carrier = carrier if cluster is None else "tcp"
        added = spec.config.options_for_roles(has_gpu=spec.has_gpu, crosses_network=carrier == "tcp")
        specs = place(replace(spec, options={**spec.options, **added}), most)
        self._folder = tempfile.TemporaryDirectory(prefix="headway-")
        self.specs = with_roles(specs, roles, BlockExchange("decode", self._folder.name, carrier))

    def create_router(self) -> Router:
        """Create a router among replicas with the same role."""
        return Router(self._router, block_size=1, counts_uncached=self._is_apart)  # the size is learnt later

    def close(self) -> None:
        """Clean up after its engines have ended."""
        if self._folder is not None:
            self._folder.cleanup()
