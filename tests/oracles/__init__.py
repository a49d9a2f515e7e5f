"""Exact enumeration of the verification rules, with which tests and the papers' tables compare."""
