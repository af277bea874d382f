"""How payloads and choices travel between the ranks: shared memory of their own making."""
