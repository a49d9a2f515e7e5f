"""Ground floor of all APIs: bodies, answers, errors, unserved fields, ids, the current call."""
