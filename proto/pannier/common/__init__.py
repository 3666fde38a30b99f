"""What client and services both use and that is no part of what they say to each other."""
