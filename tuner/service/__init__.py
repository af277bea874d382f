"""The daemon: sockets, sessions, jobs, and the join over ranks."""
