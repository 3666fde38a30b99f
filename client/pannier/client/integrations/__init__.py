"""Adapters to training frameworks: one module for each, which imports it."""
