"""The Grafana dashboard of the metrics: collectives by phase x algorithm x protocol, then the jobs."""

from __future__ import annotations

from typing import Any, Final

_SPLIT: Final = "phase, algorithm, protocol"
_OF_JOB: Final = '{zerotune_job=~"$job"}'
_JOB: Final = "{{zerotune_job}}"
_LEGEND: Final = "{{phase}} {{algorithm}}/{{protocol}}"
_DURATION: Final = "zerotune_collective_duration_seconds"

_PANELS: Final = (
    (
        "Median duration by phase, algorithm, protocol",
        "s",
        f"histogram_quantile(0.5, sum by (le, {_SPLIT}) (rate({_DURATION}_bucket{_OF_JOB}[$__rate_interval])))",
        _LEGEND,
    ),
    (
        "99th percentile of duration",
        "s",
        f"histogram_quantile(0.99, sum by (le, {_SPLIT}) (rate({_DURATION}_bucket{_OF_JOB}[$__rate_interval])))",
        _LEGEND,
    ),
    (
        "Time in collectives per second of wall time",
        "percentunit",
        f"sum by ({_SPLIT}) (rate({_DURATION}_sum{_OF_JOB}[$__rate_interval]))",
        _LEGEND,
    ),
    (
        "Algorithm bandwidth",
        "Bps",
        f"sum by ({_SPLIT}) (rate(zerotune_collective_bytes_total{_OF_JOB}[$__rate_interval]))"
        f" / sum by ({_SPLIT}) (rate({_DURATION}_sum{_OF_JOB}[$__rate_interval]))",
        _LEGEND,
    ),
    (
        "Measured collectives per second",
        "cps",
        f"sum by (collective, {_SPLIT}) (rate({_DURATION}_count{_OF_JOB}[$__rate_interval]))",
        "{{collective}} " + _LEGEND,
    ),
    ("Step time", "s", f"zerotune_job_step_seconds{_OF_JOB}", _JOB),
    ("Plan epoch", "none", f"zerotune_job_epoch{_OF_JOB}", _JOB),
    ("Share of step time spent on exploring", "percentunit", f"zerotune_job_exploration_ratio{_OF_JOB}", _JOB),
    (
        "Observations per second, and lost ones",
        "cps",
        f"rate(zerotune_job_observations_total{_OF_JOB}[$__rate_interval])",
        f"{_JOB} observed",
        f"rate(zerotune_job_dropped_total{_OF_JOB}[$__rate_interval])",
        f"{_JOB} lost",
    ),
    (
        "Late ranks, and what a step's collectives wait",
        "s",
        f"zerotune_job_rank_late_seconds{_OF_JOB}",
        f"{_JOB} rank {{{{rank}}}} on {{{{node}}}}",
        f"zerotune_job_collective_wait_seconds{_OF_JOB}",
        f"{_JOB} waiting",
        f"zerotune_job_collective_transfer_seconds{_OF_JOB}",
        f"{_JOB} transferring",
    ),
    (
        "Daemon: up, failures, refused messages, records lost or waiting",
        "none",
        "zerotune_up",
        "up",
        "rate(zerotune_daemon_errors_total[$__rate_interval])",
        "failures",
        "rate(zerotune_daemon_refused_total[$__rate_interval])",
        "refused",
        "rate(zerotune_store_lost_total[$__rate_interval])",
        "records lost",
        "zerotune_store_waiting",
        "records waiting",
    ),
)


def dashboard() -> dict[str, Any]:
    """Grafana's JSON model, for its import dialogue or provisioning folder."""
    panels = [_panel(number, *panel) for number, panel in enumerate(_PANELS)]
    return {
        "__inputs": [
            {"name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource", "pluginId": "prometheus"},
        ],
        "title": "zerotune",
        "uid": "zerotune",
        "tags": ["nccl", "zerotune"],
        "schemaVersion": 39,
        "version": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "job",
                    "type": "query",
                    "datasource": _SOURCE,
                    "query": {"query": f"label_values({_DURATION}_count, zerotune_job)", "refId": "jobs"},
                    "refresh": 2,
                    "multi": True,
                    "includeAll": True,
                    "current": {"text": "All", "value": "$__all"},
                }
            ]
        },
        "panels": panels,
    }


_SOURCE: Final = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}


def _panel(number: int, title: str, unit: str, *queries: str) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + at), "datasource": _SOURCE, "expr": expression, "legendFormat": legend}
        for at, (expression, legend) in enumerate(zip(queries[::2], queries[1::2], strict=True))
    ]
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": _SOURCE,
        "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "options": {"legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull"]}},
        "targets": targets,
    }
