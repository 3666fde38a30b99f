"""The gRPC services of the sidecar, and the trainers connected to them."""
