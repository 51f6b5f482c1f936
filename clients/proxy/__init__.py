"""The OpenAI-compatible HTTP proxy."""
