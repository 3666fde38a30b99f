"""DCP's storage interfaces over the sidecar."""
