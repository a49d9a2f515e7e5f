"""HTTP below the APIs: bodies, connections, errors, middleware and the API's description."""
