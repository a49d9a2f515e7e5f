"""`polydraft chat`: a client in a terminal, which asks a running daemon over HTTP."""
