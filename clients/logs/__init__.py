"""Reading the structured logs: one request's story, and a summary of all requests."""
