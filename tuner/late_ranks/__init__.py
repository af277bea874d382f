"""Which ranks collectives wait for, told from slow links and from chance. Pure, and nothing is decided here."""
