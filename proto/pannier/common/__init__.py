"""Mechanisms that client and services share: waits, retries, traces, fault points. No messages."""
