"""Other libraries as they are: one module for each known trap, and where modules of earlier versions went."""
