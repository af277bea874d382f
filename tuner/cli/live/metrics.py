"""`zerotune daemon metrics`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..options import AsJson, CurveKeys, Endpoint, StorePath
from ..paths import endpoint_or_default, output_file, store_path, write_text


def metrics(
    endpoint: Endpoint = None,
    store: StorePath = None,
    serve: Annotated[
        str | None,
        typer.Option(help="Serve metrics over HTTP until interrupted; default: print them once.", metavar="HOST:PORT"),
    ] = None,
    dashboard: Annotated[
        Path | None, typer.Option(help="Write the Grafana dashboard to this JSON file, and nothing else.")
    ] = None,
    curve_keys: CurveKeys = None,
    as_json: AsJson = False,
) -> None:
    """Print the daemon's Prometheus metrics, serve them, or write the Grafana dashboard.

    `zerotune daemon --metrics HOST:PORT` serves them in a process of its own, which ends with the daemon: a scraper
    cannot delay the daemon.

    Example: zerotune daemon metrics --dashboard zerotune-dashboard.json
    """
    import json

    from ....store.parent_process import end_with_parent
    from ....store.sqlite.database import Store
    from ...metrics import Collector
    from ...metrics import dashboard as grafana
    from ...metrics.child import READY
    from ...metrics.server import make_server, parse_address

    if dashboard is not None:
        write_text(output_file(dashboard), json.dumps(grafana(), indent=2) + "\n")
        print(f"{dashboard}: import it in Grafana and choose your Prometheus")
        return
    where, path = endpoint_or_default(endpoint), store_path(store)
    if serve is not None:
        end_with_parent()
        with make_server(Collector(where, path, curve_dir=curve_keys), parse_address(serve)) as server:
            print(f"{READY}http://{server.server_name}:{server.server_port}/metrics", flush=True)
            with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends it
                server.serve_forever()
        return
    if store is not None:
        Store.open(path, read_only=True).close()  # a missing or wrong file must not look like an empty store
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(where, path, from_start=True, curve_dir=curve_keys))
    if registry.get_sample_value("zerotune_up") == 0:
        print(f"zerotune: no daemon answers at {where}; these are the store's measurements alone", file=sys.stderr)
    if as_json:
        samples = [
            {"name": sample.name, "labels": sample.labels, "value": sample.value}
            for family in registry.collect()
            for sample in family.samples
        ]
        print(json.dumps(samples))
    else:
        print(generate_latest(registry).decode(), end="")
