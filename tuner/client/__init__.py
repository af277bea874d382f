"""Starts and asks a daemon from outside a job, and puts its answers into words."""
