"""Amazon S3 and servers that honour its conditional writes."""
