"""Bridges to other frameworks, each optional."""
