"""How a worker copies pages out of another worker's pool into its own."""
