"""HTTP below the APIs: bodies, connections, responses of errors, middleware and the description of
the API.
"""
