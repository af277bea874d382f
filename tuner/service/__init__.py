"""The daemon: its sockets, sessions and jobs."""
