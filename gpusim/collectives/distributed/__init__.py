"""Algorithms for groups whose members lie on several instances, with the bits of one process.

They decide what is folded where and what is moved; engines only move it. The collectives' records
call them, and say what they mean.
"""
