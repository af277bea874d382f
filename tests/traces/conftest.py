"""That there is one lets the tests of folders below import `trace_samples` and `import_runs`."""
