"""A daemon's `tcp://` address: which clients it admits, and how many resources strangers may use."""
