"""Devices, memory and process-wide settings."""
