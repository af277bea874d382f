"""One service for all users of a node: it starts a daemon for each, which runs as that user.

So the kernel keeps users apart: sockets, stores and processes are each user's own, and root reads not one byte that a
user has written.
"""
