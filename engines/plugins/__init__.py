"""Operators of ours for engines that have none like them, each with the standard operators as its reference."""
