"""What ranks do together without a hang: each wait for other ranks has a deadline, and names them."""
