"""The option `--kv-events-config`: where events of the prefix caches are published, in the form of vLLM's option."""

from __future__ import annotations

from typing import Literal

import msgspec

from headway.errors import ConfigError, did_you_mean


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names and defaults are vLLM's, except for what is said here."""

    enable_kv_cache_events: bool = True
    """In vLLM the default is false."""
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = "tcp://*:5557"
    """The address of the PUB socket. As in vLLM, the server listens there if the address has `*` or `::` or is an
    ipc:// or inproc:// one, and connects to it otherwise. An `@` before any address makes it listen there."""
    replay_endpoint: str | None = None
    """The address of the ROUTER socket for subscribers that have missed events; null for none."""
    buffer_steps: int = 10_000
    """The most batches that are kept for replays."""
    buffer_bytes: int = 256 * 2**20
    """The most bytes that are kept for replays. vLLM has no such limit."""
    hwm: int = 100_000
    """The most batches that wait for one subscriber. It does not get what exceeds them."""
    max_queue_size: int = 100_000
    """The most batches that wait to be published."""
    topic: str | None = None
    """The first frame of each message. Default: kv@HOSTNAME@MODEL. In vLLM it is empty."""

    @property
    def is_on(self) -> bool:
        """Whether anything is published."""
        return self.enable_kv_cache_events and self.publisher == "zmq"

    @property
    def address(self) -> str:
        """The endpoint as ZeroMQ takes it."""
        return self.endpoint.removeprefix("@")

    @property
    def listens(self) -> bool:
        """Whether subscribers connect to the endpoint. Otherwise it is theirs, and this server connects to it."""
        address = self.endpoint
        return "*" in address or "::" in address or address.startswith(("@", "ipc://", "inproc://"))

    @classmethod
    def parse(cls, text: str) -> KVEventsConfig:
        """Read the option's JSON. Raises `ConfigError`."""
        try:
            fields = msgspec.json.decode(text, type=dict[str, object])
        except msgspec.DecodeError as error:
            raise ConfigError(
                f'kv_events_config must be a JSON object like {{"endpoint": "tcp://*:5557"}}: {error}.'
            ) from None
        for name in fields:
            if name not in cls.__struct_fields__:
                raise ConfigError(f"kv_events_config has no field '{name}'.{did_you_mean(name, cls.__struct_fields__)}")
        try:
            config = msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"kv_events_config: {error}.") from None
        for name in ("buffer_steps", "buffer_bytes", "hwm", "max_queue_size"):
            if not 1 <= getattr(config, name) < 2**31:
                raise ConfigError(f"kv_events_config: '{name}' must be from 1 to {2**31 - 1}.")
        for name, address in (("endpoint", config.address), ("replay_endpoint", config.replay_endpoint)):
            _check_address(name, address)
        return config


def _check_address(name: str, address: str | None) -> None:
    if address is not None and not address.startswith(("tcp://", "ipc://", "inproc://")):
        raise ConfigError(
            f"kv_events_config: '{name}' must be an address like tcp://*:5557 or ipc:///run/kv, not {address!r}."
        )
