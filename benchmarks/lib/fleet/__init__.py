"""The traffic and the data of many nodes, without the nodes."""
