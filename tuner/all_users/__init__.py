"""One service for all users of a node: it starts a daemon for each, which runs as that user.

So the kernel separates users: each has their own sockets, stores and processes, and root reads no byte that a user has
written.
"""
