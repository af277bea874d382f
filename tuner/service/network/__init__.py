"""A daemon's side at `tcp://`: whom it lets in, and what those may hold whom it does not know."""
