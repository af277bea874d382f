"""A small GPT and the script that trains it."""
