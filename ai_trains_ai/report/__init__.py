"""What a run looks like: the `Run` view, its summary and its figures."""
