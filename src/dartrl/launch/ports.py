"""Which ports a run listens on, and a clear word when one is taken."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping

from dartrl.config import RunConfig
from dartrl.errors import ConfigError

SERVICE_PORTS = {"router": "port", "control": "control_port", "metrics": "metrics_port"}
"""Service -> its option in section `rollout`."""


def choose_ports(config: RunConfig) -> dict[str, int]:
    """A free port for each service of the run: router, control, metrics, and engine-0, engine-1, ...

    Configured ports are checked, 0 lets the system choose. Raises ConfigError if one is taken.
    """
    host = config.rollout.host
    held: list[socket.socket] = []
    ports: dict[str, int] = {}
    try:
        for service, option in SERVICE_PORTS.items():
            held.append(_bind(host, getattr(config.rollout, option), option))
            ports[service] = held[-1].getsockname()[1]
        for index in range(config.rollout.workers):
            held.append(_bind(host, 0, "port"))
            ports[f"engine-{index}"] = held[-1].getsockname()[1]
    finally:
        for taken in held:
            taken.close()
    return ports


def with_ports(config: RunConfig, ports: Mapping[str, int]) -> RunConfig:
    """The configuration with the ports that were chosen for the run in place of zeros."""
    chosen = {option: ports[service] for service, option in SERVICE_PORTS.items()}
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=chosen)})


def check_port(host: str, port: int, option: str) -> None:
    """Nothing, if the port is free. Raises ConfigError that names the option and the remedy."""
    _bind(host, port, option).close()


def base_url(host: str, port: int) -> str:
    """HTTP address of a service."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _bind(host: str, port: int, option: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    candidate = socket.socket(family, socket.SOCK_STREAM)
    candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        candidate.bind((host, port))
        candidate.listen(1)
    except OSError as error:
        candidate.close()
        raise ConfigError(_explain(error, host, port, option)) from error
    return candidate


def _explain(error: OSError, host: str, port: int, option: str) -> str:
    remedy = f"choose another with --set rollout.{option}=PORT, or 0 to let the system choose"
    if error.errno == errno.EADDRINUSE:
        return f"rollout.{option} is {port}, which another process listens on; {remedy}"
    if error.errno == errno.EACCES:
        return f"rollout.{option} is {port}, which needs privileges that this user lacks; {remedy}"
    return f"rollout.{option}: cannot listen on {host}:{port} ({error.strerror}); check rollout.host, or {remedy}"
