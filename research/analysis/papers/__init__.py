"""`polydraft analyze papers`: the tables of three papers for any pair, and further comparisons.

One module per paper: `optimal.py` (Hu et al., ICLR 2025), `blocks.py` (Lin et al., SpecTr-GBV),
`theoretical.py` (Yin et al., NeurIPS 2024), `races.py` (rules at equal nodes). Each measures and
returns plain data; `page.py` writes the page.
"""
