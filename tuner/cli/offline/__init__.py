"""Commands that work on files and stores."""
