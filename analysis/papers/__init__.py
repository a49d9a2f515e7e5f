"""`polydraft analyze papers`: the tables of the three papers, on any pair, and what goes beyond them.

A module a paper: `optimal.py` (Hu et al., ICLR 2025), `blocks.py` (Lin et al., SpecTr-GBV), `theoretical.py` (Yin et
al., NeurIPS 2024), `races.py` (rules at equal nodes). Each measures and returns plain data; `page.py` writes the page.
"""
