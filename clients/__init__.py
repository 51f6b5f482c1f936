"""Everything on the client's side of the wire."""
