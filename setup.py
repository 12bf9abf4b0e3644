"""The native part of the build. All else is in pyproject.toml, which has no word for cffi's modules."""

from setuptools import setup

setup(cffi_modules=["pdserve/fabric/build_core.py:ffibuilder"])
