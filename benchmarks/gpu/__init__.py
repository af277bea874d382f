"""The whole product on a machine with a GPU."""
