# SPDX-License-Identifier: Apache-2.0
"""Tests of the builder, on toy releases that are made in code."""
