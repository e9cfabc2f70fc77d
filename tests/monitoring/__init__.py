"""Dashboards and alerts, checked against a real Prometheus that scrapes a running server."""
