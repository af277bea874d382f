"""Reading a store."""
