"""From the receipts of all ranks to the bytes of ``.metadata``."""
