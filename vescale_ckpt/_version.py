"""Holds the version of the package for packaging, the command line and reports. setuptools reads it without torch."""

VERSION = "0.1.0"
