"""Mutation testing (`make mutants`): change the code one place at a time, and see which changes no
test notices.

`changes.py` makes the mutants of a module by mutmut's operators, `runs.py` runs tests on them,
`table.py` keeps what is known of them in docs/results/mutants.{json,md}. `sample.py` draws some
mutants of all modules without a record. `parts.toml` says which modules are mutated and which tests
have to notice; `harmless.toml` names mutants that nothing can notice, with the reason of each.

A mutant is a changed source file in a copy of the tree. So it is what really runs: in functions
with decorators, in daemons and other processes that a test starts, and in kernels, which Numba and
Triton compile from it.
"""
