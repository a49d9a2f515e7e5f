"""Choice of draft shapes and text drafts from measured times and acceptance."""
