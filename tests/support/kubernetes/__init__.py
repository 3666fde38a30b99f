"""Pods and manifests, without a cluster."""
