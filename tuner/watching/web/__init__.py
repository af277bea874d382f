"""The status page over HTTP. This package needs `zerotune[dashboard]`."""
