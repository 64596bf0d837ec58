"""Holds how images become patches.

SGLang finds the package by its setting SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE.
"""
