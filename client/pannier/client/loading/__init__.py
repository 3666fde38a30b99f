"""From a checkpoint in storage to a state dict."""
