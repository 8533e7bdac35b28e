"""Environments in which agents with partial knowledge cooperate, bargain or argue."""
