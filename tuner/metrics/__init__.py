"""Prometheus metrics of a daemon and its store, served by a process of their own.

A scraper, however slow or hostile, has this process only: it asks the daemon for its status at most once a second
and reads the store as any other reader does.
"""

from .collector import Collector
from .dashboard import dashboard

__all__ = ["Collector", "dashboard"]
