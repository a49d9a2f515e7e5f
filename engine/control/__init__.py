"""Choice of draft shapes from measured times and acceptance."""
