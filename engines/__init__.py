"""Engines: how a bundle's graphs run on one backend. Each is found by entry point (``specexport.engines``)."""
