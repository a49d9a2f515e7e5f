"""Ground floor of all APIs: bodies, answers and errors, fields that are not served, ids, the
current call.
"""
