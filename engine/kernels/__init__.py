"""Operations over distributions and drafted chains, in plain torch."""
