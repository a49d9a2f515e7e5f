"""Plans steps and ends answers: which requests run, and how many tokens each computes."""
