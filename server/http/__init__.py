"""HTTP below the APIs: bodies, connections, errors, middleware and the description of the API."""
