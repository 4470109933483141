"""Ports: free ones are chosen, taken ones are named with the option to change."""

from __future__ import annotations

import socket

import pytest

from dartrl.config import RolloutConfig, RunConfig
from dartrl.errors import ConfigError
from dartrl.launch.ports import base_url, check_port, choose_ports, with_ports


def free_choice(**changes: int) -> RunConfig:
    return RunConfig(rollout=RolloutConfig(**({"port": 0, "control_port": 0, "metrics_port": 0} | changes)))


def test_every_service_gets_a_port_of_its_own():
    ports = choose_ports(free_choice(workers=3))
    assert ports.keys() == {"router", "control", "metrics", "engine-0", "engine-1", "engine-2"}
    assert len(set(ports.values())) == 6
    assert all(port > 0 for port in ports.values())


def test_chosen_ports_replace_the_zeros():
    config = with_ports(free_choice(), {"router": 5, "control": 6, "metrics": 7, "engine-0": 8})
    assert (config.rollout.port, config.rollout.control_port, config.rollout.metrics_port) == (5, 6, 7)


@pytest.mark.parametrize("option", ["port", "control_port", "metrics_port"])
def test_a_taken_port_names_its_option_and_the_remedy(option: str):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = f"rollout.{option} is {port}, which another process listens on; .*--set rollout.{option}=PORT"
        with pytest.raises(ConfigError, match=message):
            choose_ports(free_choice(**{option: port}))
    check_port("127.0.0.1", port, option)


def test_an_address_of_another_machine_is_explained():
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        check_port("192.0.2.1", 0, "port")


def test_an_ipv6_address_is_bracketed():
    assert base_url("::1", 80) == "http://[::1]:80"
    assert base_url("127.0.0.1", 80) == "http://127.0.0.1:80"
