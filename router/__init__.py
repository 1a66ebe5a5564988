"""The routing brain: block index, load book, decisions. Pure: no Ray, sockets, clock or environment."""
