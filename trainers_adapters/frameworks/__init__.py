"""Adapters of trainer frameworks, one module for each; a framework is imported when its adapter is used."""
