"""How calls are made and awaited, and what is made of them: batches, supervised and named objects."""
