"""Everything between processes: wire messages, sockets, links and page transport."""
