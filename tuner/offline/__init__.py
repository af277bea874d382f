"""Tools that need no running job: sweep, replay, report, import, export."""
