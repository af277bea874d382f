"""The status page over HTTP. Whoever loads this package needs `zerotune[dashboard]`."""
