"""The router's readings in Prometheus' terms."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dartrl.metrics import Meter
from dartrl.rollout.fleet import Fleet, WorkerState


class FleetCollector(Collector):
    """Reads meter and fleet when it is scraped; keeps nothing."""

    def __init__(self, fleet: Fleet[Any], meter: Meter) -> None:
        self._fleet = fleet
        self._meter = meter

    def collect(self) -> Iterable[Metric]:
        for name, value in sorted(self._meter.readings().items()):
            yield GaugeMetricFamily(f"dartrl_{name.replace('/', '_')}", f"Reading {name} of the router.", value=value)
        yield GaugeMetricFamily("dartrl_router_waiting", "Requests in the queue.", value=self._fleet.num_waiting)
        in_flight = GaugeMetricFamily("dartrl_worker_in_flight", "Requests at a worker.", labels=["worker"])
        replies = GaugeMetricFamily("dartrl_worker_replies", "Replies of a worker so far.", labels=["worker"])
        version = GaugeMetricFamily("dartrl_worker_weights_version", "Weights version of a worker, -1 without.", labels=["worker"])
        state = GaugeMetricFamily("dartrl_worker_state", "1 for the state a worker is in.", labels=["worker", "state"])
        for worker in self._fleet.workers.values():
            in_flight.add_metric([worker.name], worker.num_in_flight)
            replies.add_metric([worker.name], worker.num_replies)
            version.add_metric([worker.name], -1 if worker.version is None else worker.version)
            for candidate in WorkerState:
                state.add_metric([worker.name, str(candidate)], float(worker.state is candidate))
        yield from (in_flight, replies, version, state)
