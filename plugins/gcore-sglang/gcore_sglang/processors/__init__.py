"""What SGLang finds here by its setting SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE: how images become
patches.
"""
