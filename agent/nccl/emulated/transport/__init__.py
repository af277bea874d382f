"""Shared memory through which ranks exchange payloads and settings."""
