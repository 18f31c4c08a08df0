"""Serve what checkflow tells to Prometheus: attach(..., on_event=to_prometheus(9100))."""

from __future__ import annotations

import sys
from collections.abc import Callable

import checkflow

try:
    from prometheus_client import Counter, Gauge, generate_latest, start_http_server
except ImportError:
    sys.exit("prometheus_client is not installed: pip install prometheus_client")


def to_prometheus(port: int | None = None) -> Callable[[checkflow.Event], None]:
    if port is not None:
        start_http_server(port)
    events = Counter("checkflow_events", "What happened to checkpoints", ["kind"])
    gauges: dict[str, Gauge] = {}

    def on_event(event: checkflow.Event) -> None:
        events.labels(type(event).__name__.lower()).inc()
        for name, value in event.metrics.items():
            if name not in gauges:
                gauges[name] = Gauge(name.replace("/", "_"), name)
            gauges[name].set(value)

    return on_event


if __name__ == "__main__":
    to_prometheus()(checkflow.Resumed(3, "00000001-iteration-3", 0.5, ()))
    sys.stdout.write(generate_latest().decode())
