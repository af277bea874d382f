"""How often training is recognised."""
