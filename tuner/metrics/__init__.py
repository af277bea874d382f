"""Prometheus metrics of a daemon and its store, served by a process of their own.

Even a slow or hostile scraper affects only this process. It asks the daemon for its status at most once a second, and
reads the store like any other reader.
"""

from .collector import Collector
from .dashboard import dashboard

__all__ = ["Collector", "dashboard"]
